"""Triton programs that find the k largest of what was collected, or of everything, and move them out."""

import triton
import triton.language as tl

from regtopk.kernels.triton_words import (
    BINS,
    COUNTS,
    NUM_CANDIDATES,
    NUM_LOST,
    PREFIX,
    SIZES,
    WANTED,
    is_refused,
    key_of,
)


@triton.jit
def _is_enough(work, k, capacity):
    """Whether the candidates were kept, all of them, and k or more reach the guess."""
    num = tl.load(work + NUM_CANDIDATES)
    return (num <= capacity) & (num - tl.load(work + NUM_LOST) >= k)


@triton.jit
def _count_digit(keys, is_counted, shift):
    digit = tl.where(is_counted, (keys >> shift) & (BINS - 1), 0).to(tl.int32)
    num_others = tl.sum((is_counted == 0).to(tl.int32))
    return tl.histogram(digit, BINS) - tl.where(tl.arange(0, BINS) == 0, num_others, 0)


@triton.jit(do_not_specialize=SIZES)
def sort_and_count(
    residual,
    work,
    tile_counts,
    tile_starts,
    tile_stops,
    slots,
    offsets,
    keys,
    numel,
    k,
    capacity,
    num_tiles,
    residual_stride,
    num_words,
    IS_CHECKED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put the candidates in the order of the row, with their keys; count the first digit.

    Where the candidates do not do, the first digit of all entries is counted instead.
    """
    row = tl.program_id(1).to(tl.int64)
    if not is_refused(work, row, num_words, IS_CHECKED):
        work += row * num_words
        residual += row * residual_stride
        slots += row * capacity
        first = tl.program_id(0).to(tl.int64) * BLOCK
        stride = tl.num_programs(0) * BLOCK
        counts = tl.zeros((BINS,), tl.int32)
        shift = KEY_BITS - 7
        is_enough = _is_enough(work, k, capacity)
        num = tl.where(is_enough, tl.load(work + NUM_CANDIDATES), numel)
        if is_enough:
            for start in range(first, num, stride):
                slot = start + tl.arange(0, BLOCK)
                mask = slot < num
                offset = tl.load(slots + slot, mask=mask, other=0).to(tl.int64)
                key = key_of(tl.load(residual + offset, mask=mask, other=0.0), KEY_BITS)
                at_tile = row * num_tiles + offset // TILE
                rank = slot - tl.load(tile_starts + at_tile, mask=mask, other=0)
                rank -= tl.load(tile_counts + at_tile, mask=mask, other=0)
                rank += tl.load(tile_stops + at_tile, mask=mask, other=0) + row * capacity
                tl.store(offsets + rank, offset.to(offsets.dtype.element_ty), mask=mask)
                tl.store(keys + rank, key, mask=mask)
                counts += _count_digit(key, mask, shift)
        else:
            for start in range(first, num, stride):
                offset = start + tl.arange(0, BLOCK)
                mask = offset < num
                key = key_of(tl.load(residual + offset, mask=mask, other=0.0), KEY_BITS)
                counts += _count_digit(key, mask, shift)
        if first < num:
            here = work + COUNTS + tl.arange(0, BINS)
            tl.atomic_add(here, counts.to(tl.int64), sem="relaxed")
        if tl.program_id(0) == 0:
            tl.store(work + WANTED, tl.full((), 0, tl.int64) + k)


@triton.jit
def _next_prefix(work, digit_index):
    """The threshold's digits before `digit_index` and the digit there, and how many are wanted then."""
    wanted = tl.load(work + WANTED + digit_index)
    bins = tl.arange(0, BINS)
    counts = tl.load(work + COUNTS + digit_index * BINS + bins)
    reaching = tl.sum(counts) - tl.cumsum(counts, 0) + counts
    digit = tl.sum((reaching >= wanted).to(tl.int32)) - 1
    wanted -= tl.sum(tl.where(bins > digit, counts, 0))
    return tl.load(work + PREFIX + digit_index) * BINS + digit, wanted


@triton.jit(do_not_specialize=SIZES)
def count_next(
    residual,
    work,
    keys,
    numel,
    k,
    capacity,
    residual_stride,
    num_words,
    IS_CHECKED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Settle the digit before this one, and count this one among the keys that start so."""
    row = tl.program_id(1).to(tl.int64)
    if not is_refused(work, row, num_words, IS_CHECKED):
        work += row * num_words
        prefix, wanted = _next_prefix(work, DIGIT - 1)
        if tl.program_id(0) == 0:
            tl.store(work + PREFIX + DIGIT, prefix)
            tl.store(work + WANTED + DIGIT, wanted)
        first = tl.program_id(0).to(tl.int64) * BLOCK
        stride = tl.num_programs(0) * BLOCK
        counts = tl.zeros((BINS,), tl.int32)
        shift: tl.constexpr = KEY_BITS - 7 - 8 * DIGIT
        is_enough = _is_enough(work, k, capacity)
        num = tl.where(is_enough, tl.load(work + NUM_CANDIDATES), numel)
        if is_enough:
            for start in range(first, num, stride):
                i = start + tl.arange(0, BLOCK)
                key = tl.load(keys + row * capacity + i, mask=i < num, other=0)
                counts += _count_digit(key, (i < num) & ((key >> (shift + 8)) == prefix), shift)
        else:
            for start in range(first, num, stride):
                i = start + tl.arange(0, BLOCK)
                a = tl.load(residual + row * residual_stride + i, mask=i < num, other=0.0)
                key = key_of(a, KEY_BITS)
                counts += _count_digit(key, (i < num) & ((key >> (shift + 8)) == prefix), shift)
        if first < num:
            here = work + COUNTS + DIGIT * BINS + tl.arange(0, BINS)
            tl.atomic_add(here, counts.to(tl.int64), sem="relaxed")


@triton.jit
def _load_key(residual, keys, is_enough, i, stop, KEY_BITS: tl.constexpr):
    """Of the candidates or of all entries; -1 from `stop` on."""
    if is_enough:
        key = tl.load(keys + i, mask=i < stop, other=-1)
    else:
        a = tl.load(residual + i, mask=i < stop, other=0.0)
        key = tl.where(i < stop, key_of(a, KEY_BITS), -1)
    return key


@triton.jit(do_not_specialize=SIZES)
def count_taken(
    residual,
    work,
    keys,
    num_above,
    num_equal,
    numel,
    k,
    capacity,
    residual_stride,
    num_words,
    IS_CHECKED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Settle the last digit, so the threshold; count what is above it and equal to it in a stretch."""
    row = tl.program_id(1).to(tl.int64)
    if not is_refused(work, row, num_words, IS_CHECKED):
        work += row * num_words
        threshold, wanted = _next_prefix(work, (KEY_BITS - 7) // 8)
        if tl.program_id(0) == 0:
            tl.store(work + PREFIX, threshold)
            tl.store(work + WANTED, wanted)
        is_enough = _is_enough(work, k, capacity)
        num = tl.where(is_enough, tl.load(work + NUM_CANDIDATES), numel)
        size = tl.cdiv(tl.cdiv(num, tl.num_programs(0)), BLOCK) * BLOCK
        first = tl.program_id(0) * size
        stop = tl.minimum(first + size, num)
        above = tl.zeros((BLOCK,), tl.int32)
        equal = tl.zeros((BLOCK,), tl.int32)
        for start in range(first, stop, BLOCK):
            i = start + tl.arange(0, BLOCK)
            key = _load_key(
                residual + row * residual_stride, keys + row * capacity, is_enough, i, stop, KEY_BITS
            )
            above += (key > threshold).to(tl.int32)
            equal += (key == threshold).to(tl.int32)
        here = row * tl.num_programs(0) + tl.program_id(0)
        tl.store(num_above + here, tl.sum(above).to(tl.int64))
        tl.store(num_equal + here, tl.sum(equal).to(tl.int64))


@triton.jit(do_not_specialize=SIZES)
def write_taken(
    residual,
    work,
    offsets,
    keys,
    num_above,
    num_equal,
    non_finite,
    indices,
    values,
    numel,
    k,
    capacity,
    residual_stride,
    num_words,
    IS_CHECKED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NUM_STRETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move a stretch's entries above the threshold out, and the first of those equal to it."""
    row = tl.program_id(1).to(tl.int64)
    here = tl.program_id(0)
    indices += row * k
    values += row * k
    is_bad = is_refused(work, row, num_words, IS_CHECKED)
    if IS_CHECKED and here == 0:
        tl.store(non_finite + row, is_bad.to(tl.uint8))
    if is_bad:
        for start in range(here * BLOCK, k, tl.num_programs(0) * BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(indices + i, i.to(tl.int64), mask=i < k)
            tl.store(values + i, tl.zeros((BLOCK,), values.dtype.element_ty), mask=i < k)
    else:
        work += row * num_words
        is_enough = _is_enough(work, k, capacity)
        num = tl.where(is_enough, tl.load(work + NUM_CANDIDATES), numel)
        size = tl.cdiv(tl.cdiv(num, tl.num_programs(0)), BLOCK) * BLOCK
        first = here * size
        stop = tl.minimum(first + size, num)
        if first < stop:
            residual += row * residual_stride
            offsets += row * capacity
            threshold = tl.load(work + PREFIX)
            wanted = tl.load(work + WANTED)
            stretch = tl.arange(0, NUM_STRETCHES)
            is_before = stretch < here
            all_before = row * tl.num_programs(0) + stretch
            equal_before = tl.sum(tl.load(num_equal + all_before, mask=is_before, other=0))
            before = tl.sum(tl.load(num_above + all_before, mask=is_before, other=0))
            before += tl.minimum(equal_before, wanted)
            for start in range(first, stop, BLOCK):
                i = start + tl.arange(0, BLOCK)
                key = _load_key(residual, keys + row * capacity, is_enough, i, stop, KEY_BITS)
                is_equal = (key == threshold).to(tl.int64)
                rank = equal_before + tl.cumsum(is_equal, 0)
                is_taken = (key > threshold) | ((is_equal != 0) & (rank <= wanted))
                position = before + tl.cumsum(is_taken.to(tl.int64), 0) - 1
                offset = i
                if is_enough:
                    offset = tl.load(offsets + i, mask=is_taken, other=0).to(tl.int64)
                a = tl.load(residual + offset, mask=is_taken, other=0.0)
                tl.store(indices + position, offset, mask=is_taken)
                tl.store(values + position, a, mask=is_taken)
                tl.store(residual + offset, tl.zeros_like(a), mask=is_taken)
                before += tl.sum(is_taken.to(tl.int64))
                equal_before += tl.sum(is_equal)
