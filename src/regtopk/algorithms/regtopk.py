"""RegTop-k: Top-k whose selection is corrected by what the last aggregate revealed."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regtopk.algorithms.posterior import LastSent, PosteriorScore
from regtopk.core.algorithm import Conversation, Promise, Sparsifier
from regtopk.core.requests import SparseSum
from regtopk.core.selection import take_largest_
from regtopk.core.state import per_worker
from regtopk.core.worker import Worker


@dataclass
class RegTopKState(LastSent):
    """The residual, and what was sent last."""

    residual: Tensor = per_worker("weighted_sum")


@dataclass(frozen=True, kw_only=True)
class RegTopK(PosteriorScore, Sparsifier[RegTopKState]):
    """Regularised Top-k (Algorithm 1).

    a^t = e^t + g^t
    D^t = the posterior distortion where s^{t-1} = 1, and Q elsewhere:

        "previous":  (g^{t-1} - w a^{t-1}) / (w a^{t-1}),   so 1 + D = g^{t-1} / (w a^{t-1})
        "current":   (g^{t-1} - w a^{t-1}) / (w a^t)        (as Algorithm 1 is printed)

    s^t = Top_k(|a^t| · u_mu(|1 + D^t|)), plain Top-k at t = 0        u_mu(x) = tanh(x / mu)
    send s^t * a^t, receive g^t = sum_n w_n (s_n^t * a_n^t)
    e^{t+1} = a^t - s^t * a^t

    Over Top-k this costs O(k) a step, and no byte.

    Args:
        density: k / J in (0, 1]; or give ``k``.
        k: entries a worker sends.
        value_code: how values are coded on the wire.
        mu: > 0; the larger, the more an entry must have survived aggregation to be sent again.
        reference: which a the distortion is measured against.
        q: the paper's Q, > -1; inf gives entries not sent last the factor 1.
        regularizer: u_mu: "tanh", "sigmoid" (2 sigmoid(x / mu) - 1), or a callable of x (a float64 tensor in
            0..10^6 mu, larger ones count as that) and mu, finite, not negative and not decreasing in x.

    Differs from the paper: the default reference is the one that gives the published figures
    (docs/paper-vs-code.md). An entry sent as exactly zero counts as not sent. With a lossy value code,
    a^{t-1} is the value as it was received.
    """

    name: ClassVar[str] = "regtopk"
    promises: ClassVar[frozenset[Promise]] = frozenset(
        {"conserves", "dense_at_full_density", "exact_k", "replicates"}
    )

    def __post_init__(self) -> None:
        """Check the options."""
        Sparsifier.__post_init__(self)
        PosteriorScore.__post_init__(self)

    def init(self, worker: Worker) -> RegTopKState:
        """Nothing is carried, and nothing was sent."""
        last_sent = LastSent.nothing(worker, self.num_selected(worker))
        return RegTopKState(residual=worker.zeros(), **last_sent)

    def exchange(self, grad: Tensor, state: RegTopKState, worker: Worker) -> Conversation:
        """One step of RegTop-k."""
        k, residual = self.num_selected(worker), state.residual
        damping = self.damping(state, lambda at: residual.gather(-1, at) + grad.gather(-1, at), worker)
        sent = take_largest_(residual, grad, k, code=self.value_code, damped=state.indices, damping=damping)
        aggregate: Tensor = yield SparseSum(sent, worker.weight)
        state.remember(sent.indices, sent.values, aggregate, worker)
        return aggregate
