"""Triton programs that read indices in the code "elias-fano" (docs/wire-format.md)."""

import triton
import triton.language as tl

from regtopk.kernels.triton_words import SIZES


@triton.jit
def _bits(words, first, num_unary, BITS: tl.constexpr):
    """This program's unary bits, and their numbers in the row."""
    place = tl.program_id(0).to(tl.int64) * BITS + tl.arange(0, BITS)
    word = tl.load(words + first + (place >> 5), mask=(place >> 5) < num_unary, other=0)
    return (word >> (place & 31).to(tl.int32)) & 1, place


@triton.jit(do_not_specialize=SIZES)
def count_ones(words, start, field_words, unary_words, num_ones, row_words, BITS: tl.constexpr):
    """How many ones there are among BITS unary bits of a row."""
    row = tl.program_id(1).to(tl.int64)
    first = tl.load(start + row) + tl.load(field_words + row)
    ones, _ = _bits(words + row * row_words, first, tl.load(unary_words + row), BITS)
    tl.store(num_ones + row * tl.num_programs(0) + tl.program_id(0), tl.sum(ones).to(tl.int64))


@triton.jit(do_not_specialize=SIZES)
def write_indices(
    words,
    start,
    count,
    width,
    field_words,
    unary_words,
    is_bitmap,
    num_ones,
    stops,
    indices,
    capacity,
    row_words,
    BITS: tl.constexpr,
):
    """The indices that belong to the ones among BITS unary bits of a row."""
    row = tl.program_id(1).to(tl.int64)
    at = row * tl.num_programs(0) + tl.program_id(0)
    num = tl.load(num_ones + at)
    if num > 0:
        words += row * row_words
        fields = tl.load(start + row)
        ones, place = _bits(words, fields + tl.load(field_words + row), tl.load(unary_words + row), BITS)
        nth = tl.load(stops + at) - num - 1 + tl.cumsum(ones, 0)
        mask = (ones > 0) & (nth < tl.load(count + row))
        bits = tl.load(width + row)
        word = fields + ((nth * bits) >> 5)
        last = row_words - 1
        low = tl.load(words + tl.minimum(word, last), mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(words + tl.minimum(word + 1, last), mask=mask, other=0).to(tl.int64) << 32
        one = tl.full((), 1, tl.int64)
        field = ((high | low) >> ((nth * bits) & 31)) & ((one << bits) - 1)
        above = place - tl.where(tl.load(is_bitmap + row) != 0, 0, nth)
        tl.store(indices + row * capacity + nth, (above << bits) + field, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def check_order(indices, count, num_bad, numel, capacity, BLOCK: tl.constexpr):
    """Tell if the indices of a row do not ascend, or lie outside of the vector."""
    row = tl.program_id(1).to(tl.int64)
    indices += row * capacity
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < tl.load(count + row)
    index = tl.load(indices + i, mask=mask, other=0)
    before = tl.load(indices + i - 1, mask=mask & (i > 0), other=-1)
    is_bad = mask & ((index <= before) | (index >= numel))
    if tl.max(is_bad.to(tl.int32)) > 0:
        tl.store(num_bad + row, 1)
