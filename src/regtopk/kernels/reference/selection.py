"""Selection in plain torch: what every fast kernel must do, to the bit.

All functions work on the last dimension, so one call serves a single worker, (J,), and a batch, (N, J).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Damped(NamedTuple):
    """Entries whose score is given."""

    indices: Tensor  # (..., m) int64, each entry once, in ascending order
    scores: Tensor  # (..., m), >= 0, in the residual's dtype


@dataclass(frozen=True, eq=False)
class Taken:
    """What a threshold took from each row: its first ``count`` entries; the rest is padding."""

    indices: Tensor  # (..., capacity) int64, ascending; zero past the count
    values: Tensor  # (..., capacity); zero past the count
    count: Tensor  # (...,) int64, how many were taken
    num_left: Tensor  # (...,) int64, how many more reached the threshold, and stayed

    @property
    def num_found(self) -> Tensor:
        """(...,) int64, how many reached the threshold."""
        return self.count + self.num_left


def take_largest_(
    residual: Tensor, grad: Tensor, k: int, damped: Damped | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Accumulate, take the k entries of largest score, and clear them from the residual.

    a = residual + grad · score_j = |a_j|, or what ``damped`` gives for j
    s = the k largest scores · residual := a - a[s], that is: zero on s.

    Args:
        residual: (..., J), float32 or float64; changed in place.
        grad: (..., J), any floating dtype; not changed.
        k: how many entries to take, 1 <= k <= J.
        damped: entries whose score is given.
        chunk: k are taken of every run of so many entries, k <= chunk; all of a last one that is shorter.
            None: the row is one run.

    Returns:
        The indices, (..., k) int64 in ascending order, and the accumulated values there.
    """
    residual.add_(grad)
    score = score_of(residual, damped)
    indices = largest(score, k) if chunk is None else _largest_per_chunk(score, chunk, k)
    return indices, take_at_(residual, None, indices)


def largest(score: Tensor, k: int) -> Tensor:
    """The indices of the k largest of each row, (..., J) gives (..., k), ascending; of equal ones the first.

    Workers that rank entries by a number they share must break a tie alike, and `topk` promises nothing.
    """
    found = score.topk(k, dim=-1, sorted=False)
    lowest = found.values.nan_to_num(nan=math.inf, posinf=math.inf).amin(-1, keepdim=True)
    if score.device.type == "cpu" and int((score >= lowest).sum()) == found.values.numel():  # no tie
        return found.indices.sort(dim=-1).values
    is_above, is_equal = ~(score <= lowest), score == lowest  # NaN is above all, as topk has it
    is_taken = is_above | (is_equal & (is_equal.cumsum(-1) <= k - is_above.sum(-1, keepdim=True)))
    place = is_taken.cumsum(-1)
    place = torch.where(is_taken & (place <= k), place - 1, k)
    entries = torch.arange(score.shape[-1], device=score.device).expand_as(score)
    return place.new_empty(*score.shape[:-1], k + 1).scatter_(-1, place, entries)[..., :k]


def score_of(accumulated: Tensor, damped: Damped | None) -> Tensor:
    """|a_j|, or the score that is given for j."""
    score = accumulated.abs()
    return score if damped is None else score.scatter_(-1, damped.indices, damped.scores)


def _largest_per_chunk(score: Tensor, chunk: int, k: int) -> Tensor:
    num_whole, rest = divmod(score.shape[-1], chunk)
    whole = num_whole * chunk
    starts = torch.arange(0, whole, chunk, device=score.device).unsqueeze(-1)
    taken = largest(score[..., :whole].unflatten(-1, (num_whole, chunk)), k).add_(starts).flatten(-2)
    if rest == 0:
        return taken
    return torch.cat([taken, whole + largest(score[..., whole:], min(k, rest))], dim=-1)


def take_above_(residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int) -> Taken:
    """Accumulate (if a gradient is given), and take the entries with |a| >= threshold.

    Of more than ``capacity`` such entries in a row the first are taken; the others stay in the residual. The
    threshold is one number, or one for each row, (...,), and is compared in the residual's dtype.
    """
    if grad is not None:
        residual.add_(grad)
    threshold = torch.as_tensor(threshold, dtype=residual.dtype, device=residual.device)
    is_found = residual.abs() >= threshold.unsqueeze(-1)
    num_found = is_found.sum(-1)
    count = num_found.clamp_max(capacity)
    indices = is_found.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    is_valid = torch.arange(capacity, device=residual.device) < count.unsqueeze(-1)
    indices = indices[..., :capacity].where(is_valid, 0)
    values = residual.gather(-1, indices).where(is_valid, 0.0)
    is_first = is_found & (is_found.cumsum(-1) <= capacity)
    residual.masked_fill_(is_first, 0.0)
    return Taken(indices, values, count, num_found - count)


def take_at_(residual: Tensor, grad: Tensor | None, indices: Tensor) -> Tensor:
    """Accumulate (if a gradient is given), and take the entries at the given indices, (..., m)."""
    if grad is not None:
        residual.add_(grad)
    values = residual.gather(-1, indices)
    residual.scatter_(-1, indices, 0.0)
    return values
