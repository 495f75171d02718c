"""EF21: send the largest changes since the last sent estimate, instead of carrying a residual."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.core import Conversation, SparseSum, Sparsifier, State, Worker, per_worker, shared, take_largest_
from regtopk.core.options import option, within


@dataclass
class EF21State(State):
    """The estimate h_n of a worker's gradient, and sum_n w_n h_n, which all know."""

    estimate: Tensor = per_worker("weighted_sum")
    aggregate: Tensor = shared(per_entry=True)


@dataclass
class EF21MomentumState(EF21State):
    """The same, and the running mean v_n of a worker's gradients."""

    average: Tensor = per_worker("weighted_sum")


@dataclass(frozen=True, kw_only=True)
class EF21(Sparsifier[EF21State]):
    """EF21 (Richtárik, Sokolov, Fatkhullin 2021) and EF21-SGDM (Fatkhullin, Tyurin, Richtárik 2023).

    v_n := (1 - eta) v_n + eta g_n                       (eta = 1: v_n = g_n, plain EF21)
    c_n = Top_k(v_n - h_n), send it                      c = sum_n w_n c_n is received
    h_n := h_n + c_n, g := g + c                         so g = sum_n w_n h_n

    h_n follows the gradient: where gradients settle, the aggregate settles too, at any k. Where they are
    noisy, give eta < 1.

    Use it for: full or large batches that must converge exactly at small densities.

    Args:
        density, k, value_code: as in `Sparsifier`.
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
        if self.eta == 1:
            return EF21State(worker.zeros(), aggregate)
        return EF21MomentumState(worker.zeros(), aggregate, worker.zeros())

    def exchange(self, grad: Tensor, state: EF21State, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        if isinstance(state, EF21MomentumState):
            # Two roundings, not a fused one: the same bits wherever an entry lies in memory.
            grad = state.average.mul_(1 - self.eta).add_(self.eta * grad.to(state.average.dtype))
        change = state.estimate.neg()
        sent = take_largest_(change, grad, k, code=self.value_code)  # change, now v - h - sent, is not needed
        state.estimate.scatter_add_(-1, sent.indices, sent.values)
        correction = yield from SparseSum(sent, worker.weight)
        state.aggregate += correction.view_as(state.aggregate)
        return state.aggregate.view_as(correction).clone()
