"""Triton programs that move entries out of a whole row, a tile by each program.

`triton_selection` does the same for candidates, which are few. The counts of a row are those above the
threshold, of all tiles, then those equal to it.
"""

import triton
import triton.language as tl

from regtopk.kernels.triton_selection import next_prefix
from regtopk.kernels.triton_words import PREFIX, SIZES, WANTED, key_of


@triton.jit
def settle(work, num_words, KEY_BITS: tl.constexpr):
    """Settle the last digit, and thereby the threshold."""
    work += tl.program_id(1).to(tl.int64) * num_words
    threshold, wanted = next_prefix(work, (KEY_BITS - 7) // 8)
    tl.store(work + PREFIX, threshold)
    tl.store(work + WANTED, wanted)


@triton.jit
def _load_tile(residual, numel, KEY_BITS: tl.constexpr, TILE: tl.constexpr):
    """Entries of a row, their keys and places: a tile of them, without a mask if it is whole."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if (tl.program_id(0) + 1).to(tl.int64) * TILE <= numel:
        a = tl.load(residual + i)
    else:
        a = tl.load(residual + i, mask=i < numel, other=0.0)
    return a, tl.where(i < numel, key_of(a, KEY_BITS), -1), i


@triton.jit(do_not_specialize=SIZES)
def count_moved(
    residual, work, taken, numel, residual_stride, num_words, KEY_BITS: tl.constexpr, TILE: tl.constexpr
):
    """Count the keys of a tile that are above the threshold, and those equal to it."""
    row = tl.program_id(1).to(tl.int64)
    threshold = tl.load(work + row * num_words + PREFIX)
    _, key, _ = _load_tile(residual + row * residual_stride, numel, KEY_BITS, TILE)
    here = taken + 2 * row * tl.num_programs(0) + tl.program_id(0)
    tl.store(here, tl.sum((key > threshold).to(tl.int32)).to(tl.int64))
    tl.store(here + tl.num_programs(0), tl.sum((key == threshold).to(tl.int32)).to(tl.int64))


@triton.jit(do_not_specialize=SIZES)
def move_out(
    residual, work, taken, stops, indices, values, numel, k, residual_stride, num_words,
    KEY_BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Move a tile's entries above the threshold out, and the first of those equal to it."""
    row = tl.program_id(1).to(tl.int64)
    work += row * num_words
    residual += row * residual_stride
    threshold, wanted = tl.load(work + PREFIX), tl.load(work + WANTED)
    at = 2 * row * tl.num_programs(0) + tl.program_id(0)
    before = tl.load(stops + at) - tl.load(taken + at)
    num_above = tl.load(stops + (2 * row + 1) * tl.num_programs(0) - 1)
    num_equal = tl.load(taken + at + tl.num_programs(0))
    equal_before = tl.load(stops + at + tl.num_programs(0)) - num_equal - num_above
    a, key, i = _load_tile(residual, numel, KEY_BITS, TILE)
    is_taken = key > threshold
    if num_equal > 0:
        is_equal = (key == threshold).to(tl.int32)
        num_wanted = tl.minimum(tl.maximum(wanted - equal_before, 0), TILE).to(tl.int32)
        is_taken = is_taken | ((is_equal > 0) & (tl.cumsum(is_equal, 0) <= num_wanted))
    first = row * k + before + tl.minimum(equal_before, wanted) - 1
    position = tl.cumsum(is_taken.to(tl.int32), 0)
    tl.store(indices + first + position, i, mask=is_taken)
    tl.store(values + first + position, a, mask=is_taken)
    tl.store(residual + i, tl.zeros_like(a), mask=is_taken)
