"""Triton programs that write and read messages whose indices are in the code "elias-fano".

docs/wire-format.md says what a message is. Every program works on one message, number `program_id(1)`.
"""

import triton
import triton.language as tl

from regtopk.kernels.cuda.programs.words import SIZES

HEADER = tl.constexpr(8)  # words of a frame
# What `read_frames` finds, a row of a table each.
COUNT, STATUS, START, WIDTH, FIELD_WORDS, UNARY_WORDS, IS_BITMAP = (tl.constexpr(i) for i in range(7))
NUM_FACTS = 7


@triton.jit(do_not_specialize=SIZES)
def write_body(
    words, indices, values, value_words, k, num_words, num_value_words, num_field_words, num_unary_words,
    width, numel, row_words, IS_BITMAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the values, fields and unary bits of BLOCK entries into words that are zero.

    Two flags behind them tell if some indices do not ascend below J, and if some values are not finite.
    """
    row = tl.program_id(1).to(tl.int64)
    words, value_words = words + row * row_words, value_words + row * num_value_words
    indices, values, flags = indices + row * k, values + row * k, words + num_words
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_word = i < num_value_words
    tl.store(words + HEADER + i, tl.load(value_words + i, mask=is_word, other=0), mask=is_word)
    mask = i < k
    index = tl.load(indices + i, mask=mask, other=0)
    before = tl.load(indices + i - 1, mask=mask & (i > 0), other=-1)
    if tl.max((mask & ((index <= before) | (index >= numel))).to(tl.int32)) > 0:
        tl.store(flags, 1)
    value = tl.load(values + i, mask=mask, other=0.0)
    is_finite = tl.abs(value) < float("inf")
    if tl.max((mask & (is_finite == 0)).to(tl.int32)) > 0:
        tl.store(flags + 1, 1)
    fields = words + HEADER + num_value_words
    bit = i * width
    shifted = (index & ((tl.full((), 1, tl.int64) << width) - 1)) << (bit & 31)
    low, high = shifted.to(tl.int32), (shifted >> 32).to(tl.int32)
    tl.atomic_or(fields + (bit >> 5), low, mask=mask & (low != 0), sem="relaxed")
    tl.atomic_or(fields + (bit >> 5) + 1, high, mask=mask & (high != 0), sem="relaxed")
    place = index >> width
    if not IS_BITMAP:
        place += i
    # A broken contract must not write out of bounds; the frame then says so.
    place = tl.minimum(tl.maximum(place, 0), 32 * num_unary_words - 1)
    one = tl.full((BLOCK,), 1, tl.int32) << (place & 31).to(tl.int32)
    tl.atomic_or(fields + num_field_words + (place >> 5), one, mask=mask, sem="relaxed")


@triton.jit
def _share_of(word, i):
    """A word's share of the checksum."""
    return (2 * i + 3) * word.to(tl.int64)


@triton.jit
def _store_long(words, i, number):
    """Write a number as two words, and return their share of the checksum."""
    low, high = number.to(tl.int32), (number >> 32).to(tl.int32)
    tl.store(words + i, low)
    tl.store(words + i + 1, high)
    return _share_of(low, i) + _share_of(high, i + 1)


@triton.jit(do_not_specialize=SIZES)
def seal(
    words, k, num_words, row_words, numel, MAGIC: tl.constexpr, KINDS: tl.constexpr,
    COUNT_OF_BAD_INDICES: tl.constexpr, COUNT_OF_BAD_VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the checksum of BLOCK words to the frame; the first program writes the frame."""
    words += tl.program_id(1).to(tl.int64) * row_words
    flags = words + num_words
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + i, mask=(i >= HEADER) & (i < num_words), other=0)
    total = tl.sum(_share_of(word, i))
    if tl.program_id(0) == 0:
        zero = tl.full((), 0, tl.int64)
        count = tl.where(tl.load(flags) != 0, zero + COUNT_OF_BAD_INDICES, zero + k)
        count = tl.where(tl.load(flags + 1) != 0, zero + COUNT_OF_BAD_VALUES, count)
        total += _store_long(words, zero, ((zero + KINDS) << 32) | MAGIC)
        total += _store_long(words, zero + 2, zero + numel)
        total += _store_long(words, zero + 4, count)
    checksum = (words + 6).to(tl.pointer_type(tl.int64), bitcast=True)
    tl.atomic_add(checksum, total, sem="relaxed")


@triton.jit
def _long(words, i):
    """Two words as one number."""
    low = tl.load(words + i).to(tl.int64) & 0xFFFFFFFF
    return (tl.load(words + i + 1).to(tl.int64) << 32) | low


@triton.jit(do_not_specialize=SIZES)
def sum_words(words, sums, are_bad, row_words, most, HAS_FLOATS: tl.constexpr, BLOCK: tl.constexpr):
    """Add BLOCK words to the checksum of their message; tell if a float32 among its values is not finite."""
    row = tl.program_id(1).to(tl.int64)
    words += row * row_words
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + i, mask=(i < row_words) & ((i < 6) | (i > 7)), other=0)
    tl.atomic_add(sums + row, tl.sum(_share_of(word, i)), sem="relaxed")
    if HAS_FLOATS:
        count = _long(words, 4)
        count = tl.where((count >= 0) & (count <= most), count, 0)
        is_bad = (i >= HEADER) & (i < count + HEADER) & ((word & 0x7F800000) == 0x7F800000)
        if tl.max(is_bad.to(tl.int32)) > 0:
            tl.store(are_bad + row, 1)


@triton.jit(do_not_specialize=SIZES)
def read_frames(
    words, sums, facts, row_words, numel, most, MAGIC: tl.constexpr, VERSION: tl.constexpr,
    VALUE_ID: tl.constexpr, ELIAS_FANO_ID: tl.constexpr, BITMAP_ID: tl.constexpr, VALUE_BITS: tl.constexpr,
    NUM_SCALES: tl.constexpr, VALUE_BLOCK: tl.constexpr, MAX_FIELD_BITS: tl.constexpr,
    COUNT_OF_BAD_INDICES: tl.constexpr, COUNT_OF_BAD_VALUES: tl.constexpr, BAD_MAGIC: tl.constexpr,
    BAD_VERSION: tl.constexpr, BAD_CODES: tl.constexpr, BAD_NUMEL: tl.constexpr, BAD_COUNT: tl.constexpr,
    BAD_LENGTH: tl.constexpr, BAD_CHECKSUM: tl.constexpr, BAD_INDICES_SENT: tl.constexpr,
    BAD_VALUES_SENT: tl.constexpr,
):  # fmt: skip
    """What a frame says, checked: how many entries there are, where their indices are, and what is wrong."""
    row = tl.program_id(1).to(tl.int64)
    words += row * row_words
    kinds = tl.load(words + 1)
    count = _long(words, 4)
    is_counted = (count >= 0) & (count <= most)
    has_bad_indices, has_bad_values = count == COUNT_OF_BAD_INDICES, count == COUNT_OF_BAD_VALUES
    count = tl.where(is_counted, count, 0)
    spread = numel // tl.maximum(count, 1)
    width = tl.full((), 0, tl.int64)
    for bit in range(1, MAX_FIELD_BITS + 1):
        width += (spread >> bit) > 0
    field_words = tl.cdiv(count * width, 32)
    unary_bits = tl.where(count > 0, count + ((numel - 1) >> width), 0)
    is_bitmap = tl.cdiv(numel, 32) < field_words + tl.cdiv(unary_bits, 32)
    width = tl.where(is_bitmap, 0, width)
    field_words = tl.where(is_bitmap, 0, field_words)
    unary_words = tl.cdiv(tl.where(is_bitmap, numel, unary_bits), 32)
    num_blocks = (count + VALUE_BLOCK - 1) // VALUE_BLOCK
    start = num_blocks * NUM_SCALES + tl.cdiv(count * VALUE_BITS, 32) + HEADER
    expected = tl.where(is_bitmap, BITMAP_ID, ELIAS_FANO_ID) | (VALUE_ID << 8)
    status = tl.where(tl.load(words) == MAGIC, 0, BAD_MAGIC)
    status += tl.where((kinds & 0xFF) == VERSION, 0, BAD_VERSION)
    status += tl.where(((kinds >> 8) == expected) | (is_counted == 0), 0, BAD_CODES)
    status += tl.where(_long(words, 2) == numel, 0, BAD_NUMEL)
    status += tl.where(is_counted | has_bad_indices | has_bad_values, 0, BAD_COUNT)
    status += tl.where(start + field_words + unary_words <= row_words, 0, BAD_LENGTH)
    status += tl.where(_long(words, 6) == tl.load(sums + row), 0, BAD_CHECKSUM)
    status += tl.where(has_bad_indices, BAD_INDICES_SENT, 0) + tl.where(has_bad_values, BAD_VALUES_SENT, 0)
    num_rows = tl.num_programs(1)
    facts += row
    tl.store(facts + num_rows * COUNT, count)
    tl.store(facts + num_rows * STATUS, status)
    tl.store(facts + num_rows * START, start)
    tl.store(facts + num_rows * WIDTH, width)
    tl.store(facts + num_rows * FIELD_WORDS, field_words)
    inside = tl.maximum(row_words - start - field_words, 0)
    tl.store(facts + num_rows * UNARY_WORDS, tl.minimum(unary_words, inside))
    tl.store(facts + num_rows * IS_BITMAP, is_bitmap.to(tl.int64))


@triton.jit
def _fact(facts, WHICH: tl.constexpr):
    return tl.load(facts + tl.num_programs(1) * WHICH + tl.program_id(1))


@triton.jit
def _bits(words, facts, BITS: tl.constexpr):
    """This program's unary bits, and their numbers in the message."""
    first = _fact(facts, START) + _fact(facts, FIELD_WORDS)
    place = tl.program_id(0).to(tl.int64) * BITS + tl.arange(0, BITS)
    word = tl.load(words + first + (place >> 5), mask=(place >> 5) < _fact(facts, UNARY_WORDS), other=0)
    return (word >> (place & 31).to(tl.int32)) & 1, place


@triton.jit(do_not_specialize=SIZES)
def count_ones(words, facts, num_ones, row_words, BITS: tl.constexpr):
    """How many ones there are among BITS unary bits of a message."""
    row = tl.program_id(1).to(tl.int64)
    ones, _ = _bits(words + row * row_words, facts, BITS)
    tl.store(num_ones + row * tl.num_programs(0) + tl.program_id(0), tl.sum(ones).to(tl.int64))


@triton.jit(do_not_specialize=SIZES)
def write_indices(words, facts, num_ones, stops, indices, capacity, row_words, BITS: tl.constexpr):
    """The indices that belong to the ones among BITS unary bits of a message."""
    row = tl.program_id(1).to(tl.int64)
    at = row * tl.num_programs(0) + tl.program_id(0)
    num = tl.load(num_ones + at)
    if num > 0:
        words += row * row_words
        ones, place = _bits(words, facts, BITS)
        nth = tl.load(stops + at) - num - 1 + tl.cumsum(ones, 0)
        mask = (ones > 0) & (nth < _fact(facts, COUNT))
        width = _fact(facts, WIDTH)
        word = _fact(facts, START) + ((nth * width) >> 5)
        last = row_words - 1
        low = tl.load(words + tl.minimum(word, last), mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
        high = tl.load(words + tl.minimum(word + 1, last), mask=mask, other=0).to(tl.int64) << 32
        one = tl.full((), 1, tl.int64)
        field = ((high | low) >> ((nth * width) & 31)) & ((one << width) - 1)
        above = place - tl.where(_fact(facts, IS_BITMAP) != 0, 0, nth)
        tl.store(indices + row * capacity + nth, (above << width) + field, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def check_order(indices, facts, are_bad_indices, numel, capacity, BLOCK: tl.constexpr):
    """Tell if the indices of a message do not ascend, or lie outside of the vector."""
    row = tl.program_id(1).to(tl.int64)
    indices += row * capacity
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < _fact(facts, COUNT)
    index = tl.load(indices + i, mask=mask, other=0)
    before = tl.load(indices + i - 1, mask=mask & (i > 0), other=-1)
    is_bad = mask & ((index <= before) | (index >= numel))
    if tl.max(is_bad.to(tl.int32)) > 0:
        tl.store(are_bad_indices + row, 1)


@triton.jit(do_not_specialize=SIZES)
def finish(
    words, facts, stops, num_parts, are_bad_indices, are_bad_values, indices, values, counts, statuses,
    row_words, capacity, HAS_FLOATS: tl.constexpr, BAD_INDICES: tl.constexpr, BAD_VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The status of a message, and its entries: none if there is something wrong, and zeros in padding."""
    row = tl.program_id(1).to(tl.int64)
    count = _fact(facts, COUNT)
    num_ones = tl.load(stops + (row + 1) * num_parts - 1)
    status = _fact(facts, STATUS)
    is_bad = (tl.load(are_bad_indices + row) != 0) | (num_ones != count)
    status += tl.where(is_bad, BAD_INDICES, 0)
    status += tl.where(tl.load(are_bad_values + row) != 0, BAD_VALUES, 0)
    count = tl.where(status == 0, count, 0)
    if tl.program_id(0) == 0:
        tl.store(counts + row, count)
        tl.store(statuses + row, status)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask, at = i < count, row * capacity + i
    tl.store(indices + at, tl.load(indices + at, mask=mask, other=0), mask=i < capacity)
    if HAS_FLOATS:
        word = tl.load(words + row * row_words + HEADER + i, mask=mask, other=0)
        tl.store(values + at, word.to(tl.float32, bitcast=True), mask=i < capacity)
    else:
        tl.store(values + at, tl.load(values + at, mask=mask, other=0.0), mask=i < capacity)
