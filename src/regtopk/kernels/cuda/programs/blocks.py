"""Triton programs of the codes "4bit", "2bit" and "sign", whose blocks have two scales.

They are lo and hi, or for "sign", the code of one bit, minus and plus.

`regtopk.core.blocks` says what the codes are, and checks these programs. What it computes in float64 or in
integers is computed so here: the bits are the same. Every program works on BLOCKS blocks of one row.
"""

import triton
import triton.language as tl

from regtopk.kernels.cuda.programs.codes import HEADER
from regtopk.kernels.cuda.programs.words import SIZES

SIZE = tl.constexpr(128)  # values of a block
FRACTION_BITS, NUM_REFINEMENTS = tl.constexpr(40), tl.constexpr(3)  # of means
LARGEST = tl.constexpr(3.4028234663852886e38)  # float32


@triton.jit
def _power_of_two(exponent):
    return ((exponent + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _mean(total, num):
    num = tl.maximum(num, 1)
    return (2 * total + num) // (2 * num)


@triton.jit
def _to_fixed(x, unit):
    return (x.to(tl.float64) * unit + 0.5).to(tl.int64)


@triton.jit
def _exponent_of(high):
    """As frexp has it: of the power of two above, 0 for zero."""
    exponent = ((high.to(tl.float64).to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022
    return tl.where(high > 0, exponent, 0)


@triton.jit
def _mean_where(is_counted, magnitude):
    """The mean of some magnitudes of each block, zero if there are none."""
    counted = tl.where(is_counted, magnitude, 0.0)
    exponent = _exponent_of(tl.max(counted, 1))
    fixed = _to_fixed(counted, _power_of_two(-(exponent - FRACTION_BITS))[:, None])
    mean = _mean(tl.sum(fixed, 1), tl.sum(is_counted.to(tl.int64), 1))
    return (mean.to(tl.float64) * _power_of_two(exponent - FRACTION_BITS)).to(tl.float32)


@triton.jit
def _two_means(magnitude, is_valid, low, high):
    """The means of the small and of the large magnitudes of each block."""
    exponent = _exponent_of(high)
    unit = _power_of_two(-(exponent - FRACTION_BITS))
    fixed, lo, hi = _to_fixed(magnitude, unit[:, None]), _to_fixed(low, unit), _to_fixed(high, unit)
    total, num = tl.sum(fixed, 1), tl.sum(is_valid.to(tl.int64), 1)
    for _ in tl.static_range(NUM_REFINEMENTS):
        is_upper = fixed > ((lo + hi) >> 1)[:, None]
        num_upper = tl.sum(is_upper.to(tl.int64), 1)
        upper = tl.sum(tl.where(is_upper, fixed, 0), 1)
        hi = tl.where(num_upper > 0, _mean(upper, num_upper), hi)
        lo = tl.where(low > 0, _mean(total - upper, num - num_upper), 0)
    unit = _power_of_two(exponent - FRACTION_BITS)
    return (lo.to(tl.float64) * unit).to(tl.float32), (hi.to(tl.float64) * unit).to(tl.float32)


@triton.jit
def _scales_of(magnitude, is_valid, is_negative, BITS: tl.constexpr):
    """lo and hi, or minus and plus, (BLOCKS,) float32."""
    high = tl.max(magnitude, 1)
    low = tl.minimum(tl.min(tl.where(is_valid, magnitude, float("inf")), 1), high)
    if BITS == 2:
        low, high = _two_means(magnitude, is_valid, low, high)
    if BITS == 1:
        low = _mean_where(is_valid & is_negative, magnitude)
        high = _mean_where(is_valid & (is_negative == 0), magnitude)
    return low, high


@triton.jit
def _magnitude_of(lo, hi, LEVEL: tl.constexpr, BITS: tl.constexpr):
    """A magnitude of each block: as float32, kept in float64, as the scales are."""
    if BITS == 2:
        return hi if LEVEL == 1 else lo
    else:
        step: tl.constexpr = LEVEL * (LEVEL + 1) // 2
        return ((lo * (28 - step) + hi * step) / 28.0).to(tl.float32).to(tl.float64)


@triton.jit
def _nearest(magnitude, is_negative, lo, hi, BITS: tl.constexpr):
    """The level whose magnitude is nearest, int32, and that magnitude, float32."""
    lo, hi, exact = lo[:, None].to(tl.float64), hi[:, None].to(tl.float64), magnitude.to(tl.float64)
    level, found, below = tl.zeros_like(magnitude).to(tl.int32), exact * 0 + lo, lo
    if BITS == 1:
        found = tl.where(is_negative, found, exact * 0 + hi)
    for i in tl.static_range(1, 1 << (BITS - 1)):
        above = _magnitude_of(lo, hi, i, BITS)
        is_above = exact > (below + above) * 0.5
        level += is_above.to(tl.int32)
        found = tl.where(is_above, above, found)
        below = above
    return level, found.to(tl.float32)


@triton.jit
def _row_and_blocks(num_parts, BLOCKS: tl.constexpr):
    """This program's row, its blocks, and the places of their values in the row."""
    program = tl.program_id(0).to(tl.int64)
    block = (program % num_parts) * BLOCKS + tl.arange(0, BLOCKS)
    return program // num_parts, block, block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def _load_magnitudes(values, row, at, k, counts, HAS_COUNTS: tl.constexpr):
    """Values, which of them are not padding, and their magnitudes, zero in padding, and signs in float32."""
    value = tl.load(values + row * k + at, mask=at < k, other=0.0)
    is_valid = at < (tl.load(counts + row) if HAS_COUNTS else k)
    single = tl.minimum(tl.maximum(value, -LARGEST), LARGEST).to(tl.float32)
    is_negative = single.to(tl.int32, bitcast=True) < 0
    is_number = is_valid & (value == value)
    return value, is_valid, tl.where(is_number, tl.abs(single), 0.0), is_negative


@triton.jit(do_not_specialize=SIZES)
def round_values(
    values, coded, counts, k, num_parts, BITS: tl.constexpr, HAS_COUNTS: tl.constexpr, BLOCKS: tl.constexpr
):
    """The values as a receiver will see them; what is not finite stays as it is, and padding is zero."""
    row, _, at = _row_and_blocks(num_parts, BLOCKS)
    value, is_valid, magnitude, is_negative = _load_magnitudes(values, row, at, k, counts, HAS_COUNTS)
    lo, hi = _scales_of(magnitude, is_valid, is_negative, BITS)
    _, found = _nearest(magnitude, is_negative, lo, hi, BITS)
    # Triton's minus has no zero of its own.
    found = (found * tl.where(is_negative, -1.0, 1.0)).to(value.dtype)
    found = tl.where(tl.abs(value) < float("inf"), found, value)
    tl.store(coded + row * k + at, tl.where(is_valid, found, 0.0), mask=at < k)


@triton.jit(do_not_specialize=SIZES)
def pack_values(
    words, values, counts, k, num_parts, num_words, num_value_words, BITS: tl.constexpr,
    HAS_COUNTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The words of values on the grid of a code: the scales of all blocks, and behind them the symbols."""
    row, block, at = _row_and_blocks(num_parts, BLOCKS)
    _, is_valid, magnitude, is_negative = _load_magnitudes(values, row, at, k, counts, HAS_COUNTS)
    lo, hi = _scales_of(magnitude, is_valid, is_negative, BITS)
    words += row * num_words
    scales, is_block = words + 2 * block, block * SIZE < k
    tl.store(scales, lo.to(tl.int32, bitcast=True), mask=is_block)
    tl.store(scales + 1, hi.to(tl.int32, bitcast=True), mask=is_block)
    level, _ = _nearest(magnitude, is_negative, lo, hi, BITS)
    symbol = tl.where(is_valid, level + tl.where(is_negative, 1 << (BITS - 1), 0), 0)
    PER: tl.constexpr = 32 // BITS  # symbols of a word
    shifted = symbol << ((tl.arange(0, SIZE) % PER) * BITS)[None, :]
    packed = tl.sum(tl.reshape(shifted, (BLOCKS, SIZE // PER, PER)), 2)
    place = block[:, None] * (SIZE // PER) + tl.arange(0, SIZE // PER)[None, :]
    tl.store(words + num_words - num_value_words + place, packed, mask=place < num_value_words)


@triton.jit(do_not_specialize=SIZES)
def unpack_values(
    words, values, counts, are_bad, capacity, num_parts, row_words, BITS: tl.constexpr, BLOCKS: tl.constexpr
):
    """The values of messages, zero from their counts on; tell if a scale cannot be."""
    row, block, at = _row_and_blocks(num_parts, BLOCKS)
    count = tl.load(counts + row)
    words += row * row_words
    num_scales = (count + SIZE - 1) // SIZE * 2
    is_block, scales = block * SIZE < count, HEADER + 2 * block
    lo = tl.load(words + scales, mask=is_block & (scales < row_words), other=0)
    hi = tl.load(words + scales + 1, mask=is_block & (scales + 1 < row_words), other=0)
    lo, hi = lo.to(tl.float32, bitcast=True), hi.to(tl.float32, bitcast=True)
    is_sound = (lo >= 0) & (hi >= 0) & (lo < float("inf")) & (hi < float("inf")) & ((lo <= hi) | (BITS == 1))
    if tl.min(is_sound.to(tl.int32), 0) == 0:
        tl.store(are_bad + row, 1)
    PER: tl.constexpr = 32 // BITS
    place, is_value = HEADER + num_scales + at // PER, at < count
    word = tl.load(words + place, mask=is_value & (place < row_words), other=0)
    symbol = (word >> ((at % PER) * BITS).to(tl.int32)) & ((1 << BITS) - 1)
    level = symbol & ((1 << (BITS - 1)) - 1)
    lo, hi = lo[:, None].to(tl.float64), hi[:, None].to(tl.float64)
    found = tl.zeros_like(level).to(tl.float64) + lo
    if BITS == 1:
        found = tl.where(symbol == 0, found * 0 + hi, found)
    for i in tl.static_range(1, 1 << (BITS - 1)):
        found = tl.where(level == i, _magnitude_of(lo, hi, i, BITS), found)
    found = (found * tl.where(symbol == level, 1.0, -1.0)).to(values.dtype.element_ty)
    tl.store(values + row * capacity + at, tl.where(is_value, found, 0.0), mask=at < capacity)
