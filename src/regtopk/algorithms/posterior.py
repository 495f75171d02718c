"""RegTop-k's score: magnitudes, corrected by what the last aggregate revealed about the entries sent.

It combines with any selection: of the whole vector, per chunk, with momentum, on a shared support.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from regtopk.core import State, Worker, check_choice, check_number, per_worker, take
from regtopk.errors import ArgumentError
from regtopk.kernels import repeat

ScoredStateT = TypeVar("ScoredStateT", bound="ScoredState")
Regularizer = Callable[[Tensor, float], Tensor]

REGULARIZERS: dict[str, Regularizer] = {
    "tanh": lambda x, mu: (x / mu).tanh_(),
    "sigmoid": lambda x, mu: 2 * torch.sigmoid(x / mu) - 1,
}
_LARGEST_X = 1e6  # in units of mu; tanh and sigmoid are 1 long before


@dataclass
class ScoredState(State):
    """The residual, and what a score needs to know about the entries sent last."""

    indices: Tensor = per_worker("reset")  # s^{t-1}
    own: Tensor = per_worker("reset")  # w_n a_n^{t-1} there
    aggregate: Tensor = per_worker("reset")  # g^{t-1} there
    residual: Tensor = per_worker("weighted_sum")

    @classmethod
    def start(cls: type[ScoredStateT], worker: Worker, num_sent: int, **more: Tensor) -> ScoredStateT:
        """The state before the first step: `num_sent` entries sent as zero, which counts as not sent."""
        return cls(
            indices=worker.zeros(num_sent, torch.int64) + torch.arange(num_sent, device=worker.weight.device),
            own=worker.zeros(num_sent),
            aggregate=worker.zeros(num_sent),
            residual=worker.zeros(),
            **more,
        )

    def remember(self, indices: Tensor, values: Tensor, aggregate: Tensor, worker: Worker) -> None:
        """Keep what was sent, (..., k), and what the aggregate, (J,), is there."""
        self.indices = indices.contiguous()  # a shared support comes as one row, expanded
        self.own = worker.weight * values
        self.aggregate = take(aggregate, indices)


@dataclass(frozen=True, kw_only=True)
class PosteriorScore:
    """The score of an entry is |a_j^t|, corrected if the entry was sent last.

        "factor":  |a_j^t| · u_mu(|1 + D_j^t|) / u_mu(|1 + Q|)      (Algorithm 1)

            "previous":  D = (g^{t-1} - w a^{t-1}) / (w a^{t-1}),   so 1 + D = g^{t-1} / (w a^{t-1})
            "current":   D = (g^{t-1} - w a^{t-1}) / (w a^t)        (as Algorithm 1 is printed)

        "cap":     min(|a_j^t|, |g_j^{t-1}| / mu)

    Where an entry cancels among workers, the factor makes its score almost |g| / (w mu), which is almost the
    same on all of them, so that they send it together or not at all. The cap is the same on all of them to
    the bit, whatever they hold and weigh (docs/why.md).

    Args:
        mu: > 0; the larger, the more an entry must have survived aggregation to be sent again.
        damping: what the score of an entry sent last is: "factor" or "cap".
        reference: which a the distortion is measured against; a cap has none.
        q: the paper's Q, > -1; inf gives entries not sent last the factor 1; a cap has none.
        regularizer: u_mu: "tanh", "sigmoid" (2 sigmoid(x / mu) - 1), or a function of x and mu that is
            finite, not negative and not decreasing in x; x is a float64 tensor, at most 10^6 mu; a cap has
            none.
    """

    mu: float = 4.0
    damping: Literal["factor", "cap"] = "factor"
    reference: Literal["previous", "current"] = "previous"
    q: float = math.inf
    regularizer: str | Regularizer = "tanh"

    def __post_init__(self) -> None:
        """Check the options."""
        check_number("mu", self.mu, "positive and finite", lambda x: 0 < x < math.inf)
        check_choice("damping", self.damping, ("factor", "cap"))
        check_choice("reference", self.reference, ("previous", "current"))
        check_number("q", self.q, "greater than -1 (inf is allowed)", lambda x: x > -1)
        is_known = isinstance(self.regularizer, str) and self.regularizer in REGULARIZERS
        if not is_known and not callable(self.regularizer):
            raise ArgumentError(
                f"regularizer must be one of {', '.join(REGULARIZERS)} or a callable, "
                f"got {self.regularizer!r}"
            )
        self._check_regularizer()
        of_a_factor = {"reference": "previous", "q": math.inf, "regularizer": "tanh"}
        for option, default in of_a_factor.items():
            if self.damping == "cap" and getattr(self, option) != default:
                raise ArgumentError(
                    f"{option} belongs to damping='factor' and must be left out with damping='cap', "
                    f"got {getattr(self, option)!r}"
                )

    def scores(self, last: ScoredState, residual: Tensor, grad: Tensor, worker: Worker) -> Tensor:
        """The scores of the entries sent last, (..., k), in the residual's dtype: O(k)."""
        given = last.indices, last.own, last.aggregate, worker.weight
        if callable(self.regularizer):  # nobody knows what it does
            return self._scores(residual, grad, *given)[0]
        return repeat(PosteriorScore._scores, (self,), (residual, grad), given)[0]

    def _scores(
        self, residual: Tensor, grad: Tensor, indices: Tensor, own: Tensor, aggregate: Tensor, weight: Tensor
    ) -> tuple[Tensor]:
        accumulated = residual.gather(-1, indices) + grad.gather(-1, indices)
        size = accumulated.abs().to(residual.dtype)
        if self.damping == "cap":
            damped = size.minimum(aggregate.abs() / self.mu)
        else:
            damped = size * self._factor(own, aggregate, weight * accumulated)
        # An entry sent as exactly zero counts as not sent.
        return (torch.where(own == 0, size, damped),)

    def _factor(self, own: Tensor, aggregate: Tensor, own_now: Tensor) -> Tensor:
        """u_mu(|1 + D|) / u_mu(|1 + Q|), computed in float64; anything where zero was sent."""
        if self.reference == "previous":
            distance = aggregate.double() / own  # 1 + D
        else:
            distance = (own_now + (aggregate - own)).double() / own_now
            distance.masked_fill_(own_now == 0, 0.0)  # where a^t = 0 the score is 0, whatever D is
        factor = self._u(distance.abs_())
        if self.q != math.inf or callable(self.regularizer):  # otherwise the factor is at most 1
            largest = torch.finfo(own.dtype).max  # finite, so that 0 · factor is 0
            factor = (factor / self._factor_elsewhere()).clamp_(max=largest)
        return factor.to(own.dtype)

    def _u(self, x: Tensor) -> Tensor:
        if isinstance(self.regularizer, str):
            return REGULARIZERS[self.regularizer](x, self.mu)
        # x is NaN only where zero was sent, and there u is not used.
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


def damped_by(
    score: PosteriorScore | None, last: ScoredState, residual: Tensor, grad: Tensor, worker: Worker
) -> dict[str, Tensor]:
    """The arguments `damped` and `scores` of a selection from residual + grad; none without a score."""
    if score is None:
        return {}
    return {"damped": last.indices, "scores": score.scores(last, residual, grad, worker)}
