"""Fast kernels for CPU tensors: one pass over memory, then k-sized work.

The largest k of J entries are found without sorting or copying J of them:

1. A small sample says which key somewhat more than k entries reach (`guess`).
2. One pass accumulates, and collects the entries that reach it.
3. If at least k were collected, the k-th largest of *them* is the threshold, exactly. Otherwise (the
   guess was wrong, many entries are equal, or k is a large part of J) all keys are counted by their
   leading 16 bits, then by the bits that follow: more passes, no more memory, exact for any input.

Of equal scores at the threshold the first in the row are taken: the result depends neither on the guess
nor on the number of threads, which is torch's.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regtopk.kernels.cpu import loops
from regtopk.kernels.cpu.compiled import Array
from regtopk.kernels.cpu.pieces import join_, spread_
from regtopk.kernels.cpu.rows import Row, like, outputs, rows_of
from regtopk.kernels.cpu.threads import over_rows, side_by_side
from regtopk.kernels.cpu.threshold import (
    collect_,
    collected,
    guess,
    threshold_by_digits,
    threshold_of_collected,
)
from regtopk.kernels.reference.selection import Taken

__all__ = ["join_", "spread_", "take_above_", "take_largest_", "take_largest_per_chunk_"]


def take_largest_(
    residual: Tensor,
    grad: Tensor,
    k: int,
    *,
    damped: Tensor | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.take_largest_`."""
    rows = rows_of(residual, grad, damped, scores)
    indices, values = outputs(residual, k)

    def take_row(n: int, num_threads: int) -> None:
        _take_largest_of_row_(rows[n].cut(num_threads), k, indices[n], values[n])

    over_rows(take_row, len(rows))
    return like(residual, indices), like(residual, values)


def take_above_(residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int) -> Taken:
    """See `reference.take_above_`."""
    rows = rows_of(residual, grad, None, None)
    indices, values = outputs(residual, capacity)
    num_found = np.empty(len(rows), np.int64)
    thresholds = torch.as_tensor(threshold, dtype=residual.dtype).clamp_min(0).abs()
    keys = thresholds.expand(residual.shape[:-1]).reshape(-1).numpy().view(rows[0].bits.dtype)

    def take_row(n: int, num_threads: int) -> None:
        row = rows[n].cut(num_threads)
        num_found[n] = _take_above_of_row_(row, keys[n], indices[n], values[n])

    over_rows(take_row, len(rows))
    found = like(residual, num_found)
    count = found.clamp_max(capacity)
    return Taken(like(residual, indices), like(residual, values), count, found - count)


def take_largest_per_chunk_(
    residual: Tensor,
    grad: Tensor,
    chunk: int,
    k_per_chunk: int,
    *,
    damped: Tensor | None = None,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.take_largest_per_chunk_`."""
    rows = rows_of(residual, grad, damped, scores)
    whole, rest = divmod(residual.shape[-1], chunk)
    indices, values = outputs(residual, whole * k_per_chunk + min(k_per_chunk, rest))

    def take_stretch(n: int, start: int, stop: int) -> None:
        row, at = rows[n], slice(start // chunk * k_per_chunk, math.ceil(stop / chunk) * k_per_chunk)
        loops.take_per_chunk_(
            row.accumulated, row.bits, row.grad, row.kind, row.mask, row.damped, row.scores, row.saved,
            start, stop, chunk, k_per_chunk, indices[n, at], values[n, at],
        )  # fmt: skip

    def take_row(n: int, num_threads: int) -> None:
        stretches = rows[n].cut(num_threads, multiple_of=chunk).stretches
        side_by_side(take_stretch, [(n, *stretch) for stretch in stretches])

    over_rows(take_row, len(rows))
    return like(residual, indices), like(residual, values)


def _take_largest_of_row_(row: Row, k: int, indices: Array, values: Array) -> None:
    least, capacity = guess(row, k)
    found = collect_(row, least, capacity // len(row.stretches))
    if k <= sum(num for num, _, _ in found) <= capacity:
        kept: list[Any] = collected(row, least, found)
        threshold, num_above, num_equal = threshold_of_collected([keys for _, keys in kept], k)
    else:
        kept = [None] * len(found)
        threshold, num_above, num_equal = threshold_by_digits(row, k)
    num_ties = _first(k - num_above.sum(), num_equal)
    stops = np.cumsum(num_above + num_ties)

    def emit(stretch: tuple[int, int], stop: int, above: int, ties: int, own: Any) -> None:
        out = slice(stop - above - ties, stop)
        if own is None:
            loops.emit_found(row.bits, *stretch, row.mask, threshold, ties, indices[out])
        else:
            positions, keys = own
            loops.emit_collected(positions, keys, threshold, ties, indices[out])
        _take_(row, stretch, indices[out], values[out])

    tasks = zip(row.stretches, stops, num_above, num_ties, kept, strict=True)
    side_by_side(emit, list(tasks))


def _take_above_of_row_(row: Row, key: Any, indices: Array, values: Array) -> int:
    capacity = indices.size
    found = collect_(row, key, capacity)
    nums = np.array([num for num, _, _ in found])
    nums_taken = _first(capacity, nums)
    stops = np.cumsum(nums_taken)

    def emit(stretch: tuple[int, int], stop: int, num: int, positions: Array) -> None:
        out = slice(stop - num, stop)
        indices[out] = positions[:num]
        _take_(row, stretch, indices[out], values[out])

    positions = [positions for _, positions, _ in found]
    side_by_side(emit, list(zip(row.stretches, stops, nums_taken, positions, strict=True)))
    indices[stops[-1] :], values[stops[-1] :] = 0, 0.0
    return int(nums.sum())


def _first(num: int, available: Array) -> Array:
    """Deal `num` out to stretches in order, each up to what is available there."""
    before = np.cumsum(available) - available
    dealt: Array = np.clip(num - before, 0, available)
    return dealt


def _take_(row: Row, stretch: tuple[int, int], indices: Array, values: Array) -> None:
    loops.take_(row.accumulated, row.damped, row.saved, *stretch, indices, values)
