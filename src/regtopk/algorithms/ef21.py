"""EF21: send the largest changes since the last sent estimate, instead of carrying a residual."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regtopk.algorithms.own_choice import ReturnsInPart
from regtopk.core import Conversation, State, Worker, extended, per_worker, shared, take_largest_
from regtopk.core.options import option, within

# What a state has more with some options: the running mean v_n of a worker's gradients, and what of the
# estimate did not arrive.
_RULES = {"average": per_worker("weighted_sum"), "unarrived": per_worker("weighted_sum")}


@dataclass
class EF21State(State):
    """The estimate h_n of a worker's gradient, and sum_n w_n h_n, which all know."""

    estimate: Tensor = per_worker("weighted_sum")
    aggregate: Tensor = shared(per_entry=True)


@dataclass(frozen=True, kw_only=True)
class EF21(ReturnsInPart[EF21State]):
    """EF21 (Richtárik, Sokolov, Fatkhullin 2021), EF21-SGDM (Fatkhullin, Tyurin, Richtárik 2023), EF21-BC.

    v_n := (1 - eta) v_n + eta g_n                       (eta = 1: v_n = g_n, plain EF21)
    c_n = Top_k(v_n - h_n), send it                      c = sum_n w_n c_n is received
    h_n := h_n + c_n, g := g + c                         so g = sum_n w_n h_n

    h_n follows the gradient: where gradients settle, the aggregate settles too, at any k. Where they are
    noisy, give eta < 1.

    With ``returned`` it is EF21-BC (Fatkhullin et al. 2021): the owners know G = sum_n w_n h_n, and all know
    g := g + Top(G - g), which is what the owners send back of what they owe.

    EF21-Muon (Gruntkowska et al. 2025) is this with eta < 1, and steps of a given size along g, without
    momentum: orthogonalised matrices, and signs elsewhere. For `regtopk compare gpt` it is
    ``ef21:eta=0.1:optimizer=lmo``. It equals the paper's algorithm where its server sends the whole model.
    The paper's way back in part is another: Top_k(X - W) of the server's model X and the workers' model W.
    With ``returned`` all take the step along g instead, and there is one model.

    Use it for: full or large batches that must converge exactly at small densities.

    Args:
        density, k, value_code, returned: as in `ReturnsInPart`.
        eta: weight of the new gradient in the running mean, in (0, 1].

    Differs from the paper: h and v start at zero, not at a first gradient sent in full.

    Checked against the authors' loop, transcribed, for eta = 1 and from the same start: the same to rounding.
    """

    name = "ef21"
    promises = frozenset({"exact_k", "replicates"})
    eta: float = option(1.0, within("(0, 1]"))

    def init(self, worker: Worker) -> EF21State:
        self.num_selected(worker)  # refuses a k that does not fit
        aggregate = worker.weight.new_zeros(*worker.batch_shape[:-1], worker.numel)
        state = EF21State(worker.zeros(), aggregate)
        if self.eta < 1:
            state = extended(state, _RULES, average=worker.zeros())
        if self.returned is not None:
            state = extended(state, _RULES, unarrived=worker.zeros())
        return self.with_owed(state, worker)

    def exchange(self, grad: Tensor, state: Any, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        if self.eta < 1:
            # Two roundings, not a fused one: the same bits wherever an entry lies in memory.
            grad = state.average.mul_(1 - self.eta).add_(self.eta * grad.to(state.average.dtype))
        _settle(state)
        change = state.estimate.neg()
        sent = take_largest_(change, grad, k, code=self.sent_code)  # change, now v - h - sent, is not needed
        state.estimate.scatter_add_(-1, sent.indices, sent.values)
        correction = yield from self.sum_sent(sent, state, worker)
        _settle(state)
        state.aggregate += correction.view_as(state.aggregate)
        aggregate: Tensor = state.aggregate.view_as(correction).clone()
        return aggregate


def _settle(state: Any) -> None:
    """Take out of h_n what did not arrive: what a code lost, or was owed when the number of ranks changed."""
    if hasattr(state, "unarrived"):
        state.estimate -= state.unarrived
        state.unarrived.zero_()
