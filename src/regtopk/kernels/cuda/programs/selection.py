"""Triton programs that find the k largest of the candidates, or of all entries, and move them out."""

import triton
import triton.language as tl

from regtopk.kernels.cuda.programs.tiles import lead_of
from regtopk.kernels.cuda.programs.words import (
    BINS,
    COUNTS,
    GUESS,
    LIMIT,
    NUM_ABOVE,
    NUM_CANDIDATES,
    PREFIX,
    SIZES,
    WANTED,
    is_enough,
    key_of,
)

COUNTED_SINGLY = tl.constexpr(32)  # up to so many keys of a block are counted faster one by one


@triton.jit
def _look_again(
    residual, offsets, keys, guess, limit, first, start, numel, KEY_BITS: tl.constexpr, TILE: tl.constexpr
):
    """Write the candidates of the tile that begins at `start`, the first of them to `first`."""
    i = start + tl.arange(0, TILE)
    mask = (i >= 0) & (i < numel)
    key = key_of(tl.load(residual + i, mask=mask, other=0.0), KEY_BITS)
    is_candidate = mask & (key >= guess) & ((limit == 0) | (key < limit))
    position = first - 1 + tl.cumsum(is_candidate.to(tl.int32), 0)
    tl.store(offsets + position, i.to(offsets.dtype.element_ty), mask=is_candidate)
    tl.store(keys + position, key, mask=is_candidate)


@triton.jit(do_not_specialize=SIZES)
def gather(
    residual, work, tile_counts, tile_stops, slots, offsets, keys, numel, k, capacity, num_tiles,
    residual_stride, num_words, IS_ALIGNED: tl.constexpr, KEY_BITS: tl.constexpr, ROOM: tl.constexpr,
    TILE: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """The candidates of NUM_TILES tiles, offsets and keys, at their places in the order of the row.

    A tile that had more than there was ROOM for is looked at again. Such tiles are neighbours, in the layers
    with the largest gradients: a program's tiles are therefore far from each other.
    """
    row = tl.program_id(1).to(tl.int64)
    work += row * num_words
    tile_counts += row * num_tiles
    tile_stops += row * num_tiles
    slots += row * num_tiles * ROOM
    total = tl.load(tile_stops + num_tiles - 1)
    if tl.program_id(0) == 0:
        tl.store(work + NUM_CANDIDATES, total)
    above = tl.load(work + NUM_ABOVE)
    if (total <= capacity) & (above + total >= k) & (above < k):
        lead = lead_of(row, residual_stride, IS_ALIGNED)
        residual += row * residual_stride
        offsets += row * capacity
        keys += row * capacity
        tile = tl.program_id(0) + tl.arange(0, NUM_TILES) * tl.num_programs(0)
        num = tl.load(tile_counts + tile, mask=tile < num_tiles, other=0)
        first = tl.load(tile_stops + tile, mask=tile < num_tiles, other=0) - num
        slot = tl.arange(0, ROOM)[None, :]
        mask = (slot < num[:, None]) & (num <= ROOM)[:, None]
        place = tl.load(slots + tile[:, None].to(tl.int64) * ROOM + slot, mask=mask, other=0)
        offset = tile[:, None].to(tl.int64) * TILE - lead + place
        key = key_of(tl.load(residual + offset, mask=mask, other=0.0), KEY_BITS)
        tl.store(offsets + first[:, None] + slot, offset.to(offsets.dtype.element_ty), mask=mask)
        tl.store(keys + first[:, None] + slot, key, mask=mask)
        if tl.max(num) > ROOM:
            guess, limit = tl.load(work + GUESS), tl.load(work + LIMIT)
            for n in range(NUM_TILES):
                again = tl.program_id(0) + n * tl.num_programs(0)
                count = tl.load(tile_counts + again, mask=again < num_tiles, other=0)
                if count > ROOM:
                    at = tl.load(tile_stops + again) - count
                    start = again.to(tl.int64) * TILE - lead
                    _look_again(residual, offsets, keys, guess, limit, at, start, numel, KEY_BITS, TILE)


@triton.jit
def _load_key(residual, keys, is_fast, i, stop, KEY_BITS: tl.constexpr):
    """The i-th keys of the candidates, or of all entries; -1 from `stop` on."""
    if is_fast:
        key = tl.load(keys + i, mask=i < stop, other=-1)
    else:
        a = tl.load(residual + i, mask=i < stop, other=0.0)
        key = tl.where(i < stop, key_of(a, KEY_BITS), -1)
    return key


@triton.jit
def next_prefix(work, digit_index):
    """The threshold's digits before `digit_index` and the digit there, and how many are wanted then."""
    wanted = tl.load(work + WANTED + digit_index)
    bins = tl.arange(0, BINS)
    counts = tl.load(work + COUNTS + digit_index * BINS + bins)
    reaching = tl.sum(counts) - tl.cumsum(counts, 0) + counts
    digit = tl.sum((reaching >= wanted).to(tl.int32)) - 1
    wanted -= tl.sum(tl.where(bins > digit, counts, 0))
    return tl.load(work + PREFIX + digit_index) * BINS + digit, wanted


@triton.jit(do_not_specialize=SIZES)
def count_digit(
    residual, work, keys, numel, k, capacity, residual_stride, num_words, KEY_BITS: tl.constexpr,
    DIGIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Settle the digit before this one, and count the values of this one among the keys that start so.

    The keys are those of the candidates, or of all entries if the candidates do not suffice.
    """
    row = tl.program_id(1).to(tl.int64)
    work += row * num_words
    is_fast = is_enough(work, k, capacity)
    prefix = tl.full((), 0, tl.int64)
    wanted = prefix + k - tl.where(is_fast, tl.load(work + NUM_ABOVE), 0)
    if DIGIT > 0:
        prefix, wanted = next_prefix(work, DIGIT - 1)
    if tl.program_id(0) == 0:
        tl.store(work + PREFIX + DIGIT, prefix)
        tl.store(work + WANTED + DIGIT, wanted)
    shift: tl.constexpr = KEY_BITS - 7 - 8 * DIGIT
    counts = tl.zeros((BINS,), tl.int32)
    all_counts = work + COUNTS + DIGIT * BINS
    num = tl.where(is_fast, tl.load(work + NUM_CANDIDATES), numel)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = _load_key(residual + row * residual_stride, keys + row * capacity, is_fast, i, num, KEY_BITS)
        is_counted = i < num
        if DIGIT > 0:
            is_counted = is_counted & ((key >> (shift + 8)) == prefix)
        num_counted = tl.sum(is_counted.to(tl.int32))
        digit = tl.where(is_counted, (key >> shift) & (BINS - 1), 0).to(tl.int32)
        if num_counted > COUNTED_SINGLY:
            counts += tl.histogram(digit, BINS)
            counts -= tl.where(tl.arange(0, BINS) == 0, BLOCK - num_counted, 0)
        elif num_counted > 0:
            one = tl.full((BLOCK,), 1, tl.int64)
            tl.atomic_add(all_counts + digit, one, mask=is_counted, sem="relaxed")
    if tl.max(counts) > 0:
        tl.atomic_add(all_counts + tl.arange(0, BINS), counts.to(tl.int64), sem="relaxed")


@triton.jit
def _stretch(num, BLOCK: tl.constexpr):
    """First and last of the keys that this program looks at, whole blocks."""
    size = tl.cdiv(tl.cdiv(num, tl.num_programs(0)), BLOCK) * BLOCK
    first = tl.program_id(0) * size
    return first, tl.minimum(first + size, num)


@triton.jit(do_not_specialize=SIZES)
def count_taken(
    residual, work, keys, taken, numel, k, capacity, residual_stride, num_words, KEY_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Settle the last digit, and thereby the threshold; count the keys above and equal to it in a stretch.

    The counts of a row are those above, of all stretches, then those equal. Looked at are the candidates, or
    all entries if these do not suffice.
    """
    row = tl.program_id(1).to(tl.int64)
    work += row * num_words
    threshold, wanted = next_prefix(work, (KEY_BITS - 7) // 8)
    if tl.program_id(0) == 0:
        tl.store(work + PREFIX, threshold)
        tl.store(work + WANTED, wanted)
    is_fast = is_enough(work, k, capacity)
    first, stop = _stretch(tl.where(is_fast, tl.load(work + NUM_CANDIDATES), numel), BLOCK)
    above = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, stop, BLOCK):
        i = start + tl.arange(0, BLOCK)
        key = _load_key(residual + row * residual_stride, keys + row * capacity, is_fast, i, stop, KEY_BITS)
        above += (key > threshold).to(tl.int32)
        equal += (key == threshold).to(tl.int32)
    here = taken + 2 * row * tl.num_programs(0) + tl.program_id(0)
    tl.store(here, tl.sum(above).to(tl.int64))
    tl.store(here + tl.num_programs(0), tl.sum(equal).to(tl.int64))


@triton.jit(do_not_specialize=SIZES)
def write_taken(
    residual, work, offsets, keys, taken, stops, indices, values, numel, k, capacity, residual_stride,
    num_words, KEY_BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move a stretch's entries above the threshold out, and the first of those equal to it."""
    row = tl.program_id(1).to(tl.int64)
    indices += row * k
    values += row * k
    work += row * num_words
    is_fast = is_enough(work, k, capacity)
    first, stop = _stretch(tl.where(is_fast, tl.load(work + NUM_CANDIDATES), numel), BLOCK)
    if first < stop:
        residual += row * residual_stride
        offsets += row * capacity
        threshold = tl.load(work + PREFIX)
        wanted = tl.load(work + WANTED)
        at = 2 * row * tl.num_programs(0) + tl.program_id(0)
        before = tl.load(stops + at) - tl.load(taken + at)
        num_above = tl.load(stops + (2 * row + 1) * tl.num_programs(0) - 1)
        at += tl.num_programs(0)
        equal_before = tl.load(stops + at) - tl.load(taken + at) - num_above
        before += tl.minimum(equal_before, wanted)
        for start in range(first, stop, BLOCK):
            i = start + tl.arange(0, BLOCK)
            key = _load_key(residual, keys + row * capacity, is_fast, i, stop, KEY_BITS)
            is_taken = key > threshold
            is_equal = (key == threshold).to(tl.int32)
            num_equal = tl.sum(is_equal).to(tl.int64)
            if num_equal > 0:
                num_wanted = tl.minimum(tl.maximum(wanted - equal_before, 0), BLOCK).to(tl.int32)
                is_taken = is_taken | ((is_equal > 0) & (tl.cumsum(is_equal, 0) <= num_wanted))
            equal_before += num_equal
            position = tl.cumsum(is_taken.to(tl.int32), 0)
            offset = i
            if is_fast:
                offset = tl.load(offsets + i, mask=is_taken, other=0).to(tl.int64)
            a = tl.load(residual + offset, mask=is_taken, other=0.0)
            tl.store(indices + before - 1 + position, offset, mask=is_taken)
            tl.store(values + before - 1 + position, a, mask=is_taken)
            tl.store(residual + offset, tl.zeros_like(a), mask=is_taken)
            before += tl.max(position)
