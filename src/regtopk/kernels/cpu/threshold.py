"""Which entries of a row on a CPU are its k largest: a guess, one pass that collects, an exact finish."""

import math
from typing import Any

import numpy as np

from regtopk.kernels.cpu import loops
from regtopk.kernels.cpu.compiled import Array
from regtopk.kernels.cpu.rows import Row
from regtopk.kernels.cpu.threads import side_by_side

_NUM_SAMPLES = 1 << 14


def position_type(numel: int) -> np.dtype[Any]:
    """The integer that holds a place in a row."""
    return np.dtype(np.uint32 if numel <= 2**32 else np.uint64)


def guess(row: Row, k: int) -> tuple[Any, int]:
    """A key that somewhat more than k entries should reach, and how many to collect at most.

    What is collected is kept in two arrays of at most J / 16 bytes each (or 128 KiB); for float32 and a
    density of up to 0.001 both together. Where they would not fit, nothing is collected.
    """
    num_samples = min(_NUM_SAMPLES, row.numel // 16) // 8 * 8
    expected = k * num_samples / row.numel
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)
    num_wanted = rank / max(1, num_samples) * row.numel
    largest = row.numel // (16 * max(row.bits.itemsize, position_type(row.numel).itemsize))
    capacity = max(row.numel // 256, min(largest, math.ceil(1.2 * num_wanted)), 1 << 14)
    if rank > num_samples // 2 or num_wanted > 0.9 * capacity:
        return row.mask, 0
    sample = np.empty(num_samples, row.accumulated.dtype)
    loops.sample_(row.accumulated, row.grad, row.kind, sample)
    keys = sample.view(row.bits.dtype) & row.mask
    keys.partition(num_samples - rank)
    return max(keys[num_samples - rank], row.bits.dtype.type(1)), capacity


def collect_(row: Row, guess: Any, capacity: int) -> list[tuple[int, Array, Array]]:
    """Accumulate. For each stretch: how many keys reach the guess, their positions, and the keys."""

    def collect(start: int, stop: int) -> tuple[int, Array, Array]:
        room = min(capacity, stop - start)
        positions = np.empty(room, position_type(row.numel))
        keys = np.empty(room, row.bits.dtype)
        num = loops.accumulate_and_collect_(
            row.accumulated, row.bits, row.grad, row.kind, row.mask, guess,
            row.damped, row.scores, row.saved, start, stop, positions, keys,
        )  # fmt: skip
        return num, positions, keys

    return side_by_side(collect, row.stretches)


def collected(row: Row, guess: Any, found: list[tuple[int, Array, Array]]) -> list[tuple[Array, Array]]:
    """What was found in each stretch; a stretch that found more than it could keep is searched again."""
    for n, (num, positions, keys) in enumerate(found):
        if num > positions.size:
            positions, keys = np.empty(num, positions.dtype), np.empty(num, keys.dtype)
            loops.collect(row.bits, *row.stretches[n], row.mask, guess, 0, positions, keys)
            found[n] = num, positions, keys
    return [(positions[:num], keys[:num]) for num, positions, keys in found]


def threshold_of_collected(stretches: list[Array], k: int) -> tuple[Any, Array, Array]:
    """The k-th largest key, and how many of each stretch are above it and equal to it."""
    keys = np.concatenate(stretches)
    keys.partition(keys.size - k)
    threshold = keys[keys.size - k]
    num_above = np.array([np.count_nonzero(s > threshold) for s in stretches])
    num_equal = np.array([np.count_nonzero(s == threshold) for s in stretches])
    return threshold, num_above, num_equal


def threshold_by_digits(row: Row, k: int) -> tuple[Any, Array, Array]:
    """The same, over all entries of the row: one pass for each 16 bits of a key."""
    num_bits = 8 * row.bits.itemsize - 1  # bits of the threshold that are not known yet
    prefix, num_above = 0, np.zeros(len(row.stretches), np.int64)
    while num_bits > 0:
        width = min(16, num_bits)
        num_bits -= width
        counts = _count_digit(row, prefix, num_bits, width)
        num_reaching = counts.sum(0, dtype=np.int64)[::-1].cumsum()[::-1]
        digit = int(np.flatnonzero(num_reaching >= k - num_above.sum())[-1])
        num_above += counts[:, digit + 1 :].sum(1, dtype=np.int64)
        prefix = (prefix << width) | digit
    return row.bits.dtype.type(prefix), num_above, counts[:, digit].astype(np.int64)


def _count_digit(row: Row, prefix: int, shift: int, width: int) -> Array:
    """For each stretch, how often each digit follows the prefix."""
    key_type = row.bits.dtype.type
    counts = np.zeros((len(row.stretches), 1 << width), np.uint32 if row.numel < 2**32 else np.uint64)

    def count(start: int, stop: int, own: Array) -> None:
        at = row.bits, start, stop, row.mask
        if shift + width == 8 * row.bits.itemsize - 1:
            loops.count_leading_digit(*at, key_type(shift), own)
        else:
            loops.count_next_digit(*at, key_type(prefix), key_type(shift), key_type(width), own)

    stretches = zip(row.stretches, counts, strict=True)
    side_by_side(count, [(*stretch, own) for stretch, own in stretches])
    return counts
