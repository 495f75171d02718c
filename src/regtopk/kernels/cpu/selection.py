"""Fast kernels for CPU tensors: one pass over memory, then k-sized work, as docs/kernels.md tells it.

The result depends neither on the guess nor on the number of threads, which is torch's.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regtopk.kernels.cpu import loops
from regtopk.kernels.cpu.compiled import Array
from regtopk.kernels.cpu.rows import Row, Stretch, cut, like, outputs, rows_of
from regtopk.kernels.cpu.threads import over_rows, side_by_side
from regtopk.kernels.cpu.threshold import collect_, collected, guess, threshold_by_digits, threshold_of_found
from regtopk.kernels.reference.selection import Damped, Taken


def take_largest_(
    residual: Tensor, grad: Tensor, k: int, damped: Damped | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.selection.take_largest_`."""
    rows = rows_of(residual, grad, damped)
    indices, values = outputs(residual, k)

    def take_row(n: int, num_threads: int) -> None:
        _take_largest_of_row_(rows[n], cut(residual.shape[-1], num_threads), k, indices[n], values[n])

    over_rows(take_row, len(rows))
    return like(residual, indices), like(residual, values)


def take_above_(residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int) -> Taken:
    """See `reference.selection.take_above_`."""
    rows = rows_of(residual, grad, None)
    indices, values = outputs(residual, capacity)
    num_found = np.empty(len(rows), np.int64)
    thresholds = torch.as_tensor(threshold, dtype=residual.dtype).clamp_min(0).abs()
    keys = thresholds.expand(residual.shape[:-1]).reshape(-1).numpy().view(rows[0].bits.dtype)

    def take_row(n: int, num_threads: int) -> None:
        stretches = cut(residual.shape[-1], num_threads)
        num_found[n] = _take_above_of_row_(rows[n], stretches, keys[n], indices[n], values[n])

    over_rows(take_row, len(rows))
    found = like(residual, num_found)
    count = found.clamp_max(capacity)
    return Taken(like(residual, indices), like(residual, values), count, found - count)


def take_largest_per_chunk_(
    residual: Tensor, grad: Tensor, chunk: int, k_per_chunk: int, damped: Damped | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.selection.take_largest_per_chunk_`."""
    rows = rows_of(residual, grad, damped)
    whole, rest = divmod(residual.shape[-1], chunk)
    indices, values = outputs(residual, whole * k_per_chunk + min(k_per_chunk, rest))

    def take_stretch(n: int, start: int, stop: int) -> None:
        at = slice(start // chunk * k_per_chunk, math.ceil(stop / chunk) * k_per_chunk)
        loops.take_per_chunk_(*rows[n], start, stop, chunk, k_per_chunk, indices[n, at], values[n, at])

    def take_row(n: int, num_threads: int) -> None:
        stretches = cut(residual.shape[-1], num_threads, multiple_of=chunk)
        side_by_side(take_stretch, [(n, *stretch) for stretch in stretches])

    over_rows(take_row, len(rows))
    return like(residual, indices), like(residual, values)


def _take_largest_of_row_(row: Row, stretches: list[Stretch], k: int, indices: Array, values: Array) -> None:
    least, capacity = guess(row, k)
    found = collect_(row, stretches, least, capacity // len(stretches))
    is_enough = k <= sum(of_stretch.num for of_stretch in found) <= capacity
    if is_enough:
        found = [collected(row, stretches[n], least, of_stretch) for n, of_stretch in enumerate(found)]
        threshold, num_above, num_equal = threshold_of_found(found, k)
    else:
        threshold, num_above, num_equal = threshold_by_digits(row, stretches, k)
    num_ties = _first(k - num_above.sum(), num_equal)
    stops = np.cumsum(num_above + num_ties)

    def move_out(n: int) -> None:
        out = slice(stops[n] - num_above[n] - num_ties[n], stops[n])
        if is_enough:
            loops.emit_collected(found[n].positions, found[n].keys, threshold, num_ties[n], indices[out])
        else:
            loops.emit_found(row.bits, *stretches[n], row.mask, threshold, num_ties[n], indices[out])
        loops.take_(row.accumulated, row.damped, row.saved, *stretches[n], indices[out], values[out])

    side_by_side(move_out, [(n,) for n in range(len(stretches))])


def _take_above_of_row_(row: Row, stretches: list[Stretch], key: Any, indices: Array, values: Array) -> int:
    found = collect_(row, stretches, key, indices.size)
    nums = np.array([of_stretch.num for of_stretch in found])
    nums_taken = _first(indices.size, nums)
    stops = np.cumsum(nums_taken)

    def move_out(n: int) -> None:
        out = slice(stops[n] - nums_taken[n], stops[n])
        indices[out] = found[n].positions[: nums_taken[n]]
        loops.take_(row.accumulated, row.damped, row.saved, *stretches[n], indices[out], values[out])

    side_by_side(move_out, [(n,) for n in range(len(stretches))])
    indices[stops[-1] :], values[stops[-1] :] = 0, 0.0
    return int(nums.sum())


def _first(num: int, available: Array) -> Array:
    """Deal `num` out to stretches in order, each up to what is available there."""
    before = np.cumsum(available) - available
    dealt: Array = np.clip(num - before, 0, available)
    return dealt
