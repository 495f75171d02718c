"""RegTop-k's score: magnitudes, corrected by what the last aggregate revealed about the entries sent.

It combines with any selection: of the whole vector, per chunk, with momentum, on a shared support.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from regtopk.core import State, Worker, one_of, option, per_worker, take, within
from regtopk.core.options import check_options
from regtopk.errors import ArgumentError
from regtopk.kernels import repeat

ScoredStateT = TypeVar("ScoredStateT", bound="ScoredState")


@dataclass
class ScoredState(State):
    """The residual, and what a score needs to know about the entries sent last."""

    indices: Tensor = per_worker("reset")  # s^{t-1}
    own: Tensor = per_worker("reset")  # w_n a_n^{t-1} there
    aggregate: Tensor = per_worker("reset")  # g^{t-1} there
    residual: Tensor = per_worker("weighted_sum")

    @classmethod
    def start(
        cls: type[ScoredStateT], worker: Worker, score: "PosteriorScore | None", num_sent: int, **more: Tensor
    ) -> ScoredStateT:
        """Before the first step `num_sent` entries are sent as zero, which counts as not sent."""
        num_sent = 0 if score is None else num_sent
        return cls(
            indices=worker.zeros(num_sent, torch.int64) + torch.arange(num_sent, device=worker.weight.device),
            own=worker.zeros(num_sent),
            aggregate=worker.zeros(num_sent),
            residual=worker.zeros(),
            **more,
        )

    def remember(self, indices: Tensor, values: Tensor, aggregate: Tensor, worker: Worker) -> None:
        """Keep what was sent, (..., k), and the aggregate, (J,), there; without a score nothing is kept."""
        if self.indices.shape[-1] == 0:
            return
        self.indices = indices.contiguous()  # a shared support comes as one row, expanded
        self.own = worker.weight * values
        self.aggregate = take(aggregate, indices)


@dataclass(frozen=True, kw_only=True)
class PosteriorScore:
    """The score of an entry is |a_j^t|, corrected if the entry was sent last.

        "factor":  |a_j^t| tanh(|1 + D_j^t| / mu) / tanh(|1 + Q| / mu)      (Algorithm 1)

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
    """

    mu: float = option(4.0, within("(0, inf)"))
    damping: Literal["factor", "cap"] = option("factor", one_of("factor", "cap"))
    reference: Literal["previous", "current"] = option("previous", one_of("previous", "current"))
    q: float = option(math.inf, within("(-1, inf]"))

    def __post_init__(self) -> None:
        check_options(self)
        for name, default in (("reference", "previous"), ("q", math.inf)):
            if self.damping == "cap" and getattr(self, name) != default:
                raise ArgumentError(
                    f"{name} belongs to damping='factor' and must be left out with damping='cap', "
                    f"got {getattr(self, name)!r}"
                )

    def scores(self, last: ScoredState, residual: Tensor, grad: Tensor, worker: Worker) -> Tensor:
        """The scores of the entries sent last, (..., k), in the residual's dtype: O(k)."""
        given = last.indices, last.own, last.aggregate, worker.weight
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
        """tanh(|1 + D| / mu) / tanh(|1 + Q| / mu), computed in float64; anything where zero was sent."""
        if self.reference == "previous":
            distance = aggregate.double() / own  # 1 + D
        else:
            distance = (own_now + (aggregate - own)).double() / own_now
            distance.masked_fill_(own_now == 0, 0.0)  # where a^t = 0 the score is 0, whatever D is
        factor = (distance.abs_() / self.mu).tanh_()
        if self.q != math.inf:  # otherwise the factor is at most 1
            elsewhere = torch.tensor((1.0 + self.q) / self.mu, dtype=torch.float64).tanh()
            largest = torch.finfo(own.dtype).max  # finite, so that 0 · factor is 0
            factor = (factor / float(elsewhere)).clamp_(max=largest)
        return factor.to(own.dtype)


def check_score(name: str, score: object) -> None:
    """Refuse a score that is neither magnitude (None) nor a `PosteriorScore`."""
    if not isinstance(score, PosteriorScore):
        raise ArgumentError(f"{name} must be None (magnitude) or a PosteriorScore, got {score!r}")


def damped_by(
    score: PosteriorScore | None, last: ScoredState, residual: Tensor, grad: Tensor, worker: Worker
) -> dict[str, Any]:
    """The arguments `damped` and `scores` of a selection from residual + grad; none without a score."""
    if score is None:
        return {}
    return {"damped": last.indices, "scores": score.scores(last, residual, grad, worker)}
