"""RegTop-k: Top-k whose selection is corrected by what the last aggregate revealed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from regtopk.core.algorithm import Conversation, Promise, Sparsifier
from regtopk.core.requests import SparseSum
from regtopk.core.selection import take_largest_
from regtopk.core.sparse import take
from regtopk.core.state import State, per_worker
from regtopk.core.worker import Worker
from regtopk.errors import ArgumentError

Regularizer = Callable[[Tensor, float], Tensor]

REGULARIZERS: dict[str, Regularizer] = {
    "tanh": lambda x, mu: torch.tanh(x / mu),
    "sigmoid": lambda x, mu: 2 * torch.sigmoid(x / mu) - 1,
}
_LARGEST_X = 1e6  # in units of mu; tanh and sigmoid are 1 long before


@dataclass
class RegTopKState(State):
    """The residual, and what was sent last: where, w_n a_n^{t-1}, and g^{t-1} there."""

    residual: Tensor = per_worker("weighted_sum")
    indices: Tensor = per_worker("reset")
    own: Tensor = per_worker("reset")
    aggregate: Tensor = per_worker("reset")


@dataclass(frozen=True, kw_only=True)
class RegTopK(Sparsifier[RegTopKState]):
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
    promises: ClassVar[frozenset[Promise]] = frozenset({"conserves", "dense_at_full_density", "exact_k"})
    mu: float = 4.0
    reference: Literal["previous", "current"] = "previous"
    q: float = math.inf
    regularizer: str | Regularizer = "tanh"

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not _is_number(self.mu) or not 0 < self.mu < math.inf:
            raise ArgumentError(f"mu must be positive and finite, got {self.mu!r}")
        if self.reference not in ("previous", "current"):
            raise ArgumentError(f"reference must be 'previous' or 'current', got {self.reference!r}")
        if not _is_number(self.q) or not self.q > -1:
            raise ArgumentError(f"q must be greater than -1 (inf is allowed), got {self.q!r}")
        is_known = isinstance(self.regularizer, str) and self.regularizer in REGULARIZERS
        if not is_known and not callable(self.regularizer):
            raise ArgumentError(
                f"regularizer must be one of {', '.join(REGULARIZERS)} or a callable, "
                f"got {self.regularizer!r}"
            )
        self._check_regularizer()

    def init(self, worker: Worker) -> RegTopKState:
        """Nothing is carried, and nothing was sent."""
        k = self.num_selected(worker)
        return RegTopKState(
            residual=worker.zeros(),
            indices=worker.zeros(k, dtype=torch.int64) + torch.arange(k, device=worker.weight.device),
            own=worker.zeros(k),  # sent as exactly zero: not sent
            aggregate=worker.zeros(k),
        )

    def exchange(self, grad: Tensor, state: RegTopKState, worker: Worker) -> Conversation:
        """One step of RegTop-k."""
        k = self.num_selected(worker)
        damping = self._damping(grad, state, worker)
        sent = take_largest_(
            state.residual, grad, k, code=self.value_code, damped=state.indices, damping=damping
        )
        aggregate: Tensor = yield SparseSum(sent, worker.weight)
        state.indices = sent.indices
        state.own = worker.weight * sent.values
        state.aggregate = take(aggregate, sent.indices)
        return aggregate

    def _damping(self, grad: Tensor, state: RegTopKState, worker: Worker) -> Tensor:
        """u_mu(|1 + D|) over u_mu(|1 + Q|), on the entries sent last: O(k), in float64."""
        if self.reference == "previous":
            above, below = state.aggregate, state.own
        else:
            accumulated = state.residual.gather(-1, state.indices) + grad.gather(-1, state.indices)
            below = worker.weight * accumulated
            above = below + (state.aggregate - state.own)
        distance = (above.double() / below.double()).abs().clamp(max=_LARGEST_X * self.mu)  # |1 + D|
        distance = distance.where(below != 0, 0.0)  # a^t = 0: its score is 0 whatever D is
        factor = self._u(distance) / self._factor_elsewhere()
        factor = factor.where(state.own != 0, 1.0)  # sent as exactly zero: as if not sent
        dtype = state.residual.dtype
        return factor.clamp(max=torch.finfo(dtype).max).to(dtype)  # finite, so that 0 · factor is 0

    def _u(self, x: Tensor) -> Tensor:
        u = REGULARIZERS[self.regularizer] if isinstance(self.regularizer, str) else self.regularizer
        return u(x, self.mu)

    def _factor_elsewhere(self) -> float:
        """C = u_mu(|1 + Q|), the factor of all entries that were not sent last."""
        if self.q == math.inf:
            return 1.0
        return float(self._u(torch.tensor(1.0 + self.q, dtype=torch.float64)))

    def _check_regularizer(self) -> None:
        steps = torch.logspace(-6, math.log10(_LARGEST_X), 97, dtype=torch.float64)
        x = self.mu * torch.cat([steps.new_zeros(1), steps])
        u = self._u(x)
        is_one_each = isinstance(u, Tensor) and u.shape == x.shape
        if not is_one_each or not bool(u.isfinite().all() and (u >= 0).all() and (u.diff() >= 0).all()):
            raise ArgumentError(
                "regularizer must give one finite u(x, mu) >= 0 for each x and must not decrease, "
                f"got {self.regularizer!r}"
            )
        if not 0 < self._factor_elsewhere() < math.inf:
            raise ArgumentError(
                f"q must have a positive factor u_mu(|1 + q|), got q={self.q} with mu={self.mu}"
            )


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
