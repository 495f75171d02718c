"""Fast kernels for CPU tensors: one pass over memory, then k-sized work, as docs/kernels.md tells it.

The result depends neither on the guess nor on the number of threads, which is torch's.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regtopk.kernels.cpu import loops
from regtopk.kernels.cpu.compiled import Array
from regtopk.kernels.cpu.rows import Row, Stretch, cut, flat, outputs, rows_of
from regtopk.kernels.cpu.threads import over_rows, side_by_side
from regtopk.kernels.reference.selection import Damped, Taken


def take_largest_(
    residual: Tensor, grad: Tensor, k: int, damped: Damped | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.selection.take_largest_`."""
    rows, numel = rows_of(residual, grad, damped), residual.shape[-1]
    num_whole, rest = divmod(numel, chunk or numel)
    taken = outputs(residual, num_whole * k + min(k, rest))
    indices, values = map(flat, taken)

    def take_row(n: int, num_threads: int) -> None:
        if chunk is None:
            _take_largest_of_row_(rows[n], cut(numel, num_threads), k, indices[n], values[n])
            return
        tasks = []
        for start, stop in cut(numel, num_threads, multiple_of=chunk):
            out = slice(start // chunk * k, math.ceil(stop / chunk) * k)
            tasks.append((*rows[n], start, stop, chunk, k, indices[n, out], values[n, out]))
        side_by_side(loops.take_per_chunk_, tasks)

    over_rows(take_row, len(rows))
    return taken


def take_above_(residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int) -> Taken:
    """See `reference.selection.take_above_`."""
    rows = rows_of(residual, grad, None)
    taken = outputs(residual, capacity)
    indices, values = map(flat, taken)
    num_found = np.empty(len(rows), np.int64)
    thresholds = torch.as_tensor(threshold, dtype=residual.dtype).clamp_min(0).abs()
    keys = thresholds.expand(residual.shape[:-1]).reshape(-1).numpy().view(rows[0].bits.dtype)

    def take_row(n: int, num_threads: int) -> None:
        stretches = cut(residual.shape[-1], num_threads)
        num_found[n] = _take_above_of_row_(rows[n], stretches, keys[n], indices[n], values[n])

    over_rows(take_row, len(rows))
    found = torch.from_numpy(num_found).view(residual.shape[:-1])
    count = found.clamp_max(capacity)
    return Taken(*taken, count, found - count)


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


_NUM_SAMPLES = 1 << 14


class Found(NamedTuple):
    """How many keys of a stretch reach a guess, and those that were kept: positions and keys."""

    num: int
    positions: Array
    keys: Array


def position_type(numel: int) -> np.dtype[Any]:
    """The integer that holds a place in a row."""
    return np.dtype(np.uint32 if numel <= 2**32 else np.uint64)


def guess(row: Row, k: int) -> tuple[Any, int]:
    """A key that somewhat more than k entries should reach, and how many to collect at most.

    What is collected is kept in two arrays of at most J / 16 bytes each (or 128 KiB); for float32 and a
    density of up to 0.001 both together. Where they would not fit, nothing is collected.
    """
    numel, key_type = row.bits.size, row.bits.dtype
    num_samples = min(_NUM_SAMPLES, numel // 16) // 8 * 8
    expected = k * num_samples / numel
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    num_wanted = rank / max(1, num_samples) * numel
    largest = numel // (16 * max(key_type.itemsize, position_type(numel).itemsize))
    capacity = max(numel // 256, min(largest, math.ceil(1.2 * num_wanted)), 1 << 14)
    if rank > num_samples // 2 or num_wanted > 0.9 * capacity:
        return row.mask, 0
    sample = np.empty(num_samples, row.accumulated.dtype)
    loops.sample_(row.accumulated, row.grad, row.kind, sample)
    keys = sample.view(key_type) & row.mask
    keys.partition(num_samples - rank)
    return max(keys[num_samples - rank], key_type.type(1)), capacity


def collect_(row: Row, stretches: list[Stretch], guess: Any, capacity: int) -> list[Found]:
    """Accumulate, and collect from each stretch what reaches the guess, as far as there is room."""

    def collect(start: int, stop: int) -> Found:
        room = min(capacity, stop - start)
        positions, keys = np.empty(room, position_type(row.bits.size)), np.empty(room, row.bits.dtype)
        num = loops.accumulate_and_collect_(*row, start, stop, guess, positions, keys)
        return Found(num, positions, keys)

    return side_by_side(collect, stretches)


def collected(row: Row, stretch: Stretch, guess: Any, found: Found) -> Found:
    """All that was found in a stretch; one that found more than it could keep is searched again."""
    num, positions, keys = found
    if num > positions.size:
        positions, keys = np.empty(num, positions.dtype), np.empty(num, keys.dtype)
        loops.collect(row.bits, *stretch, row.mask, guess, 0, positions, keys)
    return Found(num, positions[:num], keys[:num])


def threshold_of_found(found: list[Found], k: int) -> tuple[Any, Array, Array]:
    """The k-th largest key, and how many of each stretch are above it and equal to it."""
    keys = np.concatenate([of_stretch.keys for of_stretch in found])
    keys.partition(keys.size - k)
    key = keys[keys.size - k]
    num_above = np.array([np.count_nonzero(of_stretch.keys > key) for of_stretch in found])
    num_equal = np.array([np.count_nonzero(of_stretch.keys == key) for of_stretch in found])
    return key, num_above, num_equal


def threshold_by_digits(row: Row, stretches: list[Stretch], k: int) -> tuple[Any, Array, Array]:
    """The same from all entries of the row: one pass for each 16 bits of a key."""
    key_type, count_type = row.bits.dtype.type, np.uint32 if row.bits.size < 2**32 else np.uint64
    num_bits = 8 * row.bits.itemsize - 1  # bits of the threshold that are not known yet
    prefix, num_above = 0, np.zeros(len(stretches), np.int64)
    while num_bits > 0:
        width = min(16, num_bits)
        num_bits -= width
        counts = np.zeros((len(stretches), 1 << width), count_type)  # of each stretch, per digit
        digit_at = [key_type(number) for number in (prefix, num_bits, width)]
        tasks = [(row.bits, *stretches[n], row.mask, *digit_at, own) for n, own in enumerate(counts)]
        side_by_side(loops.count_next_digit, tasks)
        num_reaching = counts.sum(0, dtype=np.int64)[::-1].cumsum()[::-1]
        digit = int(np.flatnonzero(num_reaching >= k - num_above.sum())[-1])
        num_above += counts[:, digit + 1 :].sum(1, dtype=np.int64)
        prefix = (prefix << width) | digit
    return key_type(prefix), num_above, counts[:, digit].astype(np.int64)
