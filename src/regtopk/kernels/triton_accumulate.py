"""Triton programs that pass over all entries once: check, accumulate, and take what is known by then."""

import triton
import triton.language as tl

from regtopk.kernels.triton_words import (
    GUESS,
    NON_FINITE,
    NUM_CANDIDATES,
    SIZES,
    is_refused,
    key_of,
    leading_bits_of_rank,
)


@triton.jit(do_not_specialize=SIZES)
def check(grad, work, numel, stride, num_words, BLOCK: tl.constexpr):
    """Note if a row's gradient holds a NaN or inf."""
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
        tl.store(work + row * num_words + NON_FINITE, 1)


@triton.jit(do_not_specialize=SIZES)
def guess(
    residual,
    grad,
    work,
    num_groups,
    rank,
    residual_stride,
    grad_stride,
    num_words,
    KEY_BITS: tl.constexpr,
    NUM_BITS: tl.constexpr,
    NUM_SAMPLES: tl.constexpr,
):
    """The `rank`-th largest key of a sample of a, rounded down to its leading bits.

    The sample is groups of 4 neighbours, spread over the row like the multiples of the golden ratio.
    """
    row = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, NUM_SAMPLES)
    fraction = ((i // 4).to(tl.int64) * 2654435769) & 0xFFFFFFFF  # of 2^32
    offsets = (fraction * num_groups >> 32) * 4 + i % 4
    r = tl.load(residual + row * residual_stride + offsets)
    g = tl.load(grad + row * grad_stride + offsets)
    keys = key_of((r + g).to(r.dtype), KEY_BITS)
    threshold = leading_bits_of_rank(keys, rank, NUM_BITS, KEY_BITS)
    tl.store(work + row * num_words + GUESS, tl.maximum(threshold, 1))


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
        return key_of(a, KEY_BITS)
    else:
        mask = offsets < numel
        a = tl.load(residual + offsets, mask=mask, other=0.0)
        if HAS_GRAD:
            a = (a + tl.load(grad + offsets, mask=mask, other=0.0)).to(a.dtype)
            tl.store(residual + offsets, a, mask=mask)
        return tl.where(mask, key_of(a, KEY_BITS), -1)


@triton.jit(do_not_specialize=SIZES)
def accumulate(
    residual,
    grad,
    work,
    tile_counts,
    tile_starts,
    slots,
    numel,
    capacity,
    residual_stride,
    grad_stride,
    num_words,
    IS_CHECKED: tl.constexpr,
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
    if not is_refused(work, row, num_words, IS_CHECKED):
        start = tile.to(tl.int64) * TILE
        offsets = start + tl.arange(0, TILE)
        residual += row * residual_stride
        grad += row * grad_stride
        if start + TILE <= numel:
            keys = _accumulate(residual, grad, offsets, numel, HAS_GRAD, True, KEY_BITS)
        else:
            keys = _accumulate(residual, grad, offsets, numel, HAS_GRAD, False, KEY_BITS)
        is_candidate = keys >= tl.load(work + row * num_words + GUESS).to(keys.dtype)
        position = tl.cumsum(is_candidate.to(tl.int32), 0)
        num = tl.max(position, 0)
        at_tile = row * tl.num_programs(0) + tile
        tl.store(tile_counts + at_tile, num.to(tl.int64))
        if KEEP and num > 0:
            claimed = work + row * num_words + NUM_CANDIDATES
            first = tl.atomic_add(claimed, num.to(tl.int64), sem="relaxed")
            tl.store(tile_starts + at_tile, first.to(tl.int32))
            slot = first + position - 1
            here = slots + row * capacity + slot
            tl.store(here, offsets.to(slots.dtype.element_ty), mask=is_candidate & (slot < capacity))


@triton.jit(do_not_specialize=SIZES)
def write_above(
    residual,
    work,
    tile_stops,
    indices,
    values,
    numel,
    capacity,
    residual_stride,
    num_words,
    KEY_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Move a tile's entries that reach the guess out, while there is room."""
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    at_tile = row * tl.num_programs(0) + tile
    before = tl.load(tile_stops + at_tile - 1, mask=tile > 0, other=0)
    if (tl.load(tile_stops + at_tile) > before) & (before < capacity):
        offsets = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        residual += row * residual_stride
        a = tl.load(residual + offsets, mask=offsets < numel, other=0.0)
        is_found = (key_of(a, KEY_BITS) >= tl.load(work + row * num_words + GUESS)) & (offsets < numel)
        position = before + tl.cumsum(is_found.to(tl.int32), 0) - 1
        is_taken = is_found & (position < capacity)
        tl.store(indices + row * capacity + position, offsets, mask=is_taken)
        tl.store(values + row * capacity + position, a, mask=is_taken)
        tl.store(residual + offsets, tl.zeros_like(a), mask=is_taken)


@triton.jit(do_not_specialize=SIZES)
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
    key = tl.where(mask, key_of(a, KEY_BITS), -1)
    wanted = tl.minimum(k, stop - start)
    threshold = leading_bits_of_rank(key, wanted, KEY_BITS, KEY_BITS)
    is_equal = (key == threshold).to(tl.int32)
    wanted_equal = wanted - tl.sum((key > threshold).to(tl.int32))
    is_taken = (key > threshold) | ((is_equal != 0) & (tl.cumsum(is_equal, 0) <= wanted_equal))
    position = row * num_taken + tl.program_id(0).to(tl.int64) * k
    position += tl.cumsum(is_taken.to(tl.int32), 0) - 1
    tl.store(indices + position, offsets, mask=is_taken)
    tl.store(values + position, a, mask=is_taken)
    tl.store(residual + offsets, tl.where(is_taken, 0.0, a), mask=mask)
