"""RegTop-k's score: what the last aggregate revealed about the entries a worker sent.

A part that combines with any selection: by magnitude, per chunk, with momentum, on a shared support.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from regtopk.core.sparse import take
from regtopk.core.state import State, per_worker
from regtopk.core.worker import Worker
from regtopk.errors import ArgumentError

Regularizer = Callable[[Tensor, float], Tensor]

REGULARIZERS: dict[str, Regularizer] = {
    "tanh": lambda x, mu: (x / mu).tanh_(),
    "sigmoid": lambda x, mu: 2 * torch.sigmoid(x / mu) - 1,
}
_LARGEST_X = 1e6  # in units of mu; tanh and sigmoid are 1 long before


@dataclass
class LastSent(State):
    """What was sent last: where, w_n a_n^{t-1}, and g^{t-1} there."""

    indices: Tensor = per_worker("reset")
    own: Tensor = per_worker("reset")
    aggregate: Tensor = per_worker("reset")

    @staticmethod
    def nothing(worker: Worker, k: int) -> dict[str, Any]:
        """The fields before anything was sent: k entries sent as exactly zero, which count as not sent."""
        return {
            "indices": worker.zeros(k, dtype=torch.int64) + torch.arange(k, device=worker.weight.device),
            "own": worker.zeros(k),
            "aggregate": worker.zeros(k),
        }

    def remember(self, indices: Tensor, values: Tensor, aggregate: Tensor, worker: Worker) -> None:
        """Keep what was sent, (..., k), and what the dense aggregate is there."""
        self.indices = indices.contiguous()  # a shared support comes as one row, expanded
        self.own = worker.weight * values
        self.aggregate = take(aggregate, indices)


@dataclass(frozen=True, kw_only=True)
class PosteriorScore:
    """score_j = |a_j^t| · u_mu(|1 + D_j^t|) / u_mu(|1 + Q|), D on the entries sent last.

        "previous":  D = (g^{t-1} - w a^{t-1}) / (w a^{t-1}),   so 1 + D = g^{t-1} / (w a^{t-1})
        "current":   D = (g^{t-1} - w a^{t-1}) / (w a^t)        (as Algorithm 1 is printed)

    Args:
        mu: > 0; the larger, the more an entry must have survived aggregation to be sent again.
        reference: which a the distortion is measured against.
        q: the paper's Q, > -1; inf gives entries not sent last the factor 1.
        regularizer: u_mu: "tanh", "sigmoid" (2 sigmoid(x / mu) - 1), or a callable of x (a float64 tensor in
            0..10^6 mu, larger ones count as that) and mu, finite, not negative and not decreasing in x.
    """

    mu: float = 4.0
    reference: Literal["previous", "current"] = "previous"
    q: float = math.inf
    regularizer: str | Regularizer = "tanh"

    def __post_init__(self) -> None:
        """Check the options."""
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

    def damping(self, last: LastSent, accumulated: Callable[[Tensor], Tensor], worker: Worker) -> Tensor:
        """u_mu(|1 + D|) over u_mu(|1 + Q|), on the entries sent last: O(k), in float64.

        Args:
            last: what was sent.
            accumulated: a^t at given indices, asked only by "current".
            worker: whose weight counts.
        """
        if self.reference == "previous":
            above, below = last.aggregate, last.own
        else:
            below = worker.weight * accumulated(last.indices)
            above = below + (last.aggregate - last.own)
        distance = above.double().div_(below).abs_()  # |1 + D|
        if below is not last.own:
            distance.masked_fill_(below == 0, 0.0)  # a^t = 0: its score is 0 whatever D is
        factor = self._u(distance)
        if self.q != math.inf or callable(self.regularizer):  # otherwise it is at most 1
            largest = torch.finfo(last.own.dtype).max  # finite, so that 0 · factor is 0
            factor = (factor / self._factor_elsewhere()).clamp_(max=largest)
        # sent as exactly zero: as if not sent
        return torch.where(last.own == 0, 1.0, factor).to(last.own.dtype)

    def _u(self, x: Tensor) -> Tensor:
        if isinstance(self.regularizer, str):
            return REGULARIZERS[self.regularizer](x, self.mu)
        # nothing was sent where x is NaN, so that its u does not count
        return self.regularizer(x.nan_to_num(nan=0.0).clamp_(max=_LARGEST_X * self.mu), self.mu)

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


def check_score(score: object) -> None:
    """Refuse a score that is neither magnitude (None) nor a `PosteriorScore`."""
    if score is not None and not isinstance(score, PosteriorScore):
        raise ArgumentError(f"score must be None (magnitude) or a PosteriorScore, got {score!r}")


def damping_of(
    score: PosteriorScore | None, last: LastSent, residual: Tensor, grad: Tensor, worker: Worker
) -> dict[str, Tensor]:
    """`damped` and `damping` of a selection from residual + grad; nothing if it goes by magnitude."""
    if score is None:
        return {}
    damping = score.damping(last, lambda at: residual.gather(-1, at) + grad.gather(-1, at), worker)
    return {"damped": last.indices, "damping": damping}


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
