"""The programs of the CUDA kernels, compiled by Triton; `triton` launches them, in this order.

The bits of |x| read as an integer order like |x| itself: that integer is x's *key*. Every program works
on one row, number `program_id(1)`. A row's words in `work` (int64, zero at first) are how one launch
tells the next what it found: nothing is read back by the host.

    0          candidates: entries whose key reached the guess
    1          damped candidates whose score does not reach it after all
    2          the guess
    8 + i      the leading i digits of the threshold (8 bits a digit)
    24 + i     how many more are to be taken among the keys that start so
    40 + 256 i how many keys have each value of digit i, after the digits before it
"""

import triton
import triton.language as tl

TILE = 4096  # entries an accumulating program works on
BLOCK = 2048  # entries looked at together after that
NUM_CANDIDATES, NUM_LOST, GUESS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PREFIX, WANTED, COUNTS = tl.constexpr(8), tl.constexpr(24), tl.constexpr(40)
BINS = tl.constexpr(256)


def num_words(key_bits: int) -> int:
    """Words of `work` a row takes."""
    return int(COUNTS.value) + (key_bits + 1) // 8 * int(BINS.value)


@triton.jit
def _key(x, KEY_BITS: tl.constexpr):
    if KEY_BITS == 31:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def _leading_bits_of_rank(keys, rank, num_bits, KEY_BITS: tl.constexpr):
    """The leading bits of the `rank`-th largest key, found one after the other; int64."""
    found = tl.full((), 0, tl.int64)
    bit = tl.full((), 1, tl.int64) << (KEY_BITS - 1)
    for _ in range(num_bits):
        num = tl.sum((keys >= (found + bit).to(keys.dtype)).to(tl.int32))
        found = tl.where(num >= rank, found + bit, found)
        bit = bit >> 1
    return found


@triton.jit
def _is_refused(flags, row, HAS_FLAGS: tl.constexpr):
    if HAS_FLAGS:
        return tl.load(flags + row) != 0
    else:
        return False


@triton.jit
def check(grad, flags, numel, stride, BLOCK: tl.constexpr):
    """Set a row's flag if its gradient holds a NaN or inf."""
    row = tl.program_id(1).to(tl.int64)
    grad += row * stride
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= numel:  # without a mask, loads are 16 bytes wide whatever J is
        x = tl.load(grad + start + tl.arange(0, BLOCK))
    else:
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(grad + offsets, mask=offsets < numel, other=0.0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    if tl.sum((tl.abs(x) < float("inf")).to(tl.int32)) < BLOCK:
        tl.store(flags + row, 1)


@triton.jit
def guess(
    residual,
    grad,
    work,
    num_groups,
    step,
    rank,
    residual_stride,
    grad_stride,
    num_words,
    KEY_BITS: tl.constexpr,
    NUM_SAMPLES: tl.constexpr,
):
    """The `rank`-th largest key of a sample of a, rounded down to its leading 16 bits.

    The sample is groups of 8 neighbours (what memory delivers at once), spread without a period.
    """
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, NUM_SAMPLES)
    offsets = (i // 8).to(tl.int64) * step % num_groups * 8 + i % 8
    r = tl.load(residual + row * residual_stride + offsets)
    g = tl.load(grad + row * grad_stride + offsets)
    keys = _key((r + g).to(r.dtype), KEY_BITS)
    threshold = _leading_bits_of_rank(keys, rank, 16, KEY_BITS)
    tl.store(work + row * num_words + GUESS, tl.maximum(threshold, 1))


@triton.jit
def damp_before(
    residual,
    grad,
    damped,
    damping,
    saved,
    flags,
    num_damped,
    residual_stride,
    grad_stride,
    HAS_FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Save a where it is damped, and leave a residual there that `accumulate` cannot overlook.

    With score = |a| · damping, the residual becomes ±score with the gradient's sign, so that what
    `accumulate` finds, |±score + g|, is at least the score. `damp_after` then puts the score there.
    """
    row = tl.program_id(1).to(tl.int64)
    if not _is_refused(flags, row, HAS_FLAGS):
        d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = d < num_damped
        d = row * num_damped + d
        j = tl.load(damped + d, mask=mask, other=0)
        here = residual + row * residual_stride + j
        r = tl.load(here, mask=mask, other=0.0)
        g = tl.load(grad + row * grad_stride + j, mask=mask, other=0.0)
        a = (r + g).to(r.dtype)
        score = tl.abs(a) * tl.load(damping + d, mask=mask, other=0.0)
        tl.store(saved + d, a, mask=mask)
        tl.store(here, tl.where(g < 0, -score, score), mask=mask)


@triton.jit
def damp_after(
    residual,
    damped,
    damping,
    saved,
    flags,
    work,
    num_damped,
    residual_stride,
    num_words,
    KEY_BITS: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put the scores where `damp_before` announced them; count who does not reach the guess now."""
    row = tl.program_id(1).to(tl.int64)
    if not _is_refused(flags, row, HAS_FLAGS):
        d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = d < num_damped
        d = row * num_damped + d
        here = residual + row * residual_stride + tl.load(damped + d, mask=mask, other=0)
        announced = tl.load(here, mask=mask, other=0.0)
        score = tl.abs(tl.load(saved + d, mask=mask, other=0.0))
        score = score * tl.load(damping + d, mask=mask, other=0.0)
        tl.store(here, score, mask=mask)
        least = tl.load(work + row * num_words + GUESS)
        is_lost = mask & (_key(announced, KEY_BITS) >= least) & (_key(score, KEY_BITS) < least)
        num_lost = tl.sum(is_lost.to(tl.int32))
        if num_lost > 0:
            tl.atomic_add(work + row * num_words + NUM_LOST, num_lost.to(tl.int64), sem="relaxed")


@triton.jit
def damp_here(
    residual,
    damped,
    damping,
    saved,
    num_damped,
    residual_stride,
    BLOCK: tl.constexpr,
):
    """Save what is already accumulated where it is damped, and put the score there."""
    row = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = d < num_damped
    d = row * num_damped + d
    here = residual + row * residual_stride + tl.load(damped + d, mask=mask, other=0)
    a = tl.load(here, mask=mask, other=0.0)
    tl.store(saved + d, a, mask=mask)
    tl.store(here, tl.abs(a) * tl.load(damping + d, mask=mask, other=0.0), mask=mask)


@triton.jit
def undamp(
    residual,
    damped,
    saved,
    flags,
    indices,
    values,
    num_damped,
    k,
    half_k,
    num_steps,
    residual_stride,
    HAS_FLAGS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put a back for the score: among the values if the entry was taken, else in the residual.

    Looks for it in the ascending indices by bisection, from 2^(num_steps - 1) = half_k < k on.
    """
    row = tl.program_id(1).to(tl.int64)
    if not _is_refused(flags, row, HAS_FLAGS):
        d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = d < num_damped
        d = row * num_damped + d
        j = tl.load(damped + d, mask=mask, other=0)
        a = tl.load(saved + d, mask=mask, other=0.0)
        indices += row * k
        low = tl.zeros((BLOCK,), tl.int64)  # the last position whose index is <= j, if any
        width = tl.full((), 0, tl.int64) + half_k
        for _ in range(num_steps):
            probe = low + width
            at = tl.load(indices + probe, mask=mask & (probe < k), other=0)
            low = tl.where((probe < k) & (at <= j), probe, low)
            width = width // 2
        is_taken = tl.load(indices + low, mask=mask, other=-1) == j
        tl.store(values + row * k + low, a, mask=mask & is_taken)
        tl.store(residual + row * residual_stride + j, a, mask=mask & (is_taken == 0))


@triton.jit
def _accumulate(
    residual,
    grad,
    offsets,
    numel,
    HAS_GRAD: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    KEY_BITS: tl.constexpr,
):
    """residual += grad; the keys, or -1 beyond the end."""
    if IS_WHOLE:  # without a mask, loads are 16 bytes wide whatever J is
        a = tl.load(residual + offsets)
        if HAS_GRAD:
            a = (a + tl.load(grad + offsets)).to(a.dtype)
            tl.store(residual + offsets, a)
        return _key(a, KEY_BITS)
    else:
        mask = offsets < numel
        a = tl.load(residual + offsets, mask=mask, other=0.0)
        if HAS_GRAD:
            a = (a + tl.load(grad + offsets, mask=mask, other=0.0)).to(a.dtype)
            tl.store(residual + offsets, a, mask=mask)
        return tl.where(mask, _key(a, KEY_BITS), -1)


@triton.jit
def accumulate(
    residual,
    grad,
    flags,
    least_keys,
    num_candidates,
    tile_counts,
    tile_starts,
    slots,
    numel,
    capacity,
    residual_stride,
    grad_stride,
    word_stride,
    HAS_FLAGS: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    KEEP: tl.constexpr,
    KEY_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """residual += grad on a tile; count its candidates, and keep their offsets if asked.

    Tiles claim room in `slots` in the order they finish: `tile_starts` says where each one's begins.
    """
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    if not _is_refused(flags, row, HAS_FLAGS):
        start = tile.to(tl.int64) * TILE
        offsets = start + tl.arange(0, TILE)
        residual += row * residual_stride
        grad += row * grad_stride
        if start + TILE <= numel:
            keys = _accumulate(residual, grad, offsets, numel, HAS_GRAD, True, KEY_BITS)
        else:
            keys = _accumulate(residual, grad, offsets, numel, HAS_GRAD, False, KEY_BITS)
        is_candidate = keys >= tl.load(least_keys + row * word_stride).to(keys.dtype)
        position = tl.cumsum(is_candidate.to(tl.int32), 0)
        num = tl.max(position, 0)
        at_tile = row * tl.num_programs(0) + tile
        tl.store(tile_counts + at_tile, num)
        if KEEP and num > 0:
            claimed = num_candidates + row * word_stride
            first = tl.atomic_add(claimed, num.to(tl.int64), sem="relaxed")
            tl.store(tile_starts + at_tile, first.to(tl.int32))
            slot = first + position - 1
            here = slots + row * capacity + slot
            tl.store(here, offsets.to(slots.dtype.element_ty), mask=is_candidate & (slot < capacity))


@triton.jit
def write_above(
    residual,
    least_keys,
    tile_stops,
    indices,
    values,
    numel,
    capacity,
    residual_stride,
    KEY_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Move a tile's entries that reach a given key out, while there is room."""
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    at_tile = row * tl.num_programs(0) + tile
    before = tl.load(tile_stops + at_tile - 1, mask=tile > 0, other=0)
    if (tl.load(tile_stops + at_tile) > before) & (before < capacity):
        offsets = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        residual += row * residual_stride
        a = tl.load(residual + offsets, mask=offsets < numel, other=0.0)
        is_found = (_key(a, KEY_BITS) >= tl.load(least_keys + row)) & (offsets < numel)
        position = before + tl.cumsum(is_found.to(tl.int32), 0) - 1
        is_taken = is_found & (position < capacity)
        tl.store(indices + row * capacity + position, offsets, mask=is_taken)
        tl.store(values + row * capacity + position, a, mask=is_taken)
        tl.store(residual + offsets, tl.zeros_like(a), mask=is_taken)


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


@triton.jit
def sort_and_count(
    residual,
    flags,
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
    HAS_FLAGS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put the candidates in the order of the row, with their keys; count the first digit.

    Where the candidates do not do, the first digit of all entries is counted instead.
    """
    row = tl.program_id(1).to(tl.int64)
    if not _is_refused(flags, row, HAS_FLAGS):
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
                key = _key(tl.load(residual + offset, mask=mask, other=0.0), KEY_BITS)
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
                key = _key(tl.load(residual + offset, mask=mask, other=0.0), KEY_BITS)
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


@triton.jit
def count_next(
    residual,
    flags,
    work,
    keys,
    numel,
    k,
    capacity,
    residual_stride,
    num_words,
    HAS_FLAGS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    DIGIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Settle the digit before this one, and count this one among the keys that start so."""
    row = tl.program_id(1).to(tl.int64)
    if not _is_refused(flags, row, HAS_FLAGS):
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
                key = _key(a, KEY_BITS)
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
        key = tl.where(i < stop, _key(a, KEY_BITS), -1)
    return key


@triton.jit
def count_taken(
    residual,
    flags,
    work,
    keys,
    num_above,
    num_equal,
    numel,
    k,
    capacity,
    residual_stride,
    num_words,
    HAS_FLAGS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Settle the last digit, so the threshold; count what is above it and equal to it in a stretch."""
    row = tl.program_id(1).to(tl.int64)
    if not _is_refused(flags, row, HAS_FLAGS):
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


@triton.jit
def write_taken(
    residual,
    flags,
    work,
    offsets,
    keys,
    num_above,
    num_equal,
    indices,
    values,
    numel,
    k,
    capacity,
    residual_stride,
    num_words,
    HAS_FLAGS: tl.constexpr,
    KEY_BITS: tl.constexpr,
    NUM_STRETCHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move a stretch's entries above the threshold out, and the first of those equal to it."""
    row = tl.program_id(1).to(tl.int64)
    here = tl.program_id(0)
    indices += row * k
    values += row * k
    if _is_refused(flags, row, HAS_FLAGS):
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


@triton.jit
def take_per_chunk(
    residual,
    grad,
    indices,
    values,
    numel,
    chunk,
    k,
    num_taken,
    residual_stride,
    grad_stride,
    HAS_GRAD: tl.constexpr,
    KEY_BITS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Accumulate a chunk, and move its k largest out; `num_taken` a row, `SIZE` >= chunk."""
    row = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * chunk
    stop = tl.minimum(start + chunk, numel)
    offsets = start + tl.arange(0, SIZE)
    mask = offsets < stop
    residual += row * residual_stride
    a = tl.load(residual + offsets, mask=mask, other=0.0)
    if HAS_GRAD:
        a = (a + tl.load(grad + row * grad_stride + offsets, mask=mask, other=0.0)).to(a.dtype)
    key = tl.where(mask, _key(a, KEY_BITS), -1)
    wanted = tl.minimum(k, stop - start)
    threshold = _leading_bits_of_rank(key, wanted, KEY_BITS, KEY_BITS)
    is_equal = (key == threshold).to(tl.int32)
    wanted_equal = wanted - tl.sum((key > threshold).to(tl.int32))
    is_taken = (key > threshold) | ((is_equal != 0) & (tl.cumsum(is_equal, 0) <= wanted_equal))
    position = row * num_taken + tl.program_id(0).to(tl.int64) * k
    position += tl.cumsum(is_taken.to(tl.int32), 0) - 1
    tl.store(indices + position, offsets, mask=is_taken)
    tl.store(values + position, a, mask=is_taken)
    tl.store(residual + offsets, tl.where(is_taken, 0.0, a), mask=mask)
