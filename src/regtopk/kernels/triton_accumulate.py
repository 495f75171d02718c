"""Triton programs that pass over all entries once: they accumulate, and count or take entries."""

import triton
import triton.language as tl

from regtopk.kernels.triton_words import (
    GUESS,
    LIMIT,
    SIZES,
    key_of,
    lead_of,
    leading_bits_of_rank,
    start_of,
)


@triton.jit
def _accumulate(residual, grad, places, mask, HAS_GRAD: tl.constexpr, KEY_BITS: tl.constexpr):
    """residual += grad; the keys, or -1 where masked. Loads without a mask are 16 bytes wide."""
    if mask is None:
        a = tl.load(residual + places)
        if HAS_GRAD:
            a = (a + tl.load(grad + places)).to(a.dtype)
            tl.store(residual + places, a)
        return key_of(a, KEY_BITS)
    else:
        a = tl.load(residual + places, mask=mask, other=0.0)
        if HAS_GRAD:
            a = (a + tl.load(grad + places, mask=mask, other=0.0)).to(a.dtype)
            tl.store(residual + places, a, mask=mask)
        return tl.where(mask, key_of(a, KEY_BITS), -1)


@triton.jit(do_not_specialize=SIZES)
def accumulate(
    residual,
    grad,
    work,
    tile_counts,
    tile_above,
    slots,
    numel,
    residual_stride,
    grad_stride,
    num_words,
    IS_ALIGNED: tl.constexpr,
    IS_WIDE: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    KEY_BITS: tl.constexpr,
    ROOM: tl.constexpr,
    TILE: tl.constexpr,
):
    """residual += grad on a tile; count its candidates, and keep where in it the first ROOM of them are.

    In a wide plan also count the entries that reach the limit.

    Programs start at the end of a row: a driver has just read the gradient, so its end may be in the cache.
    """
    row = tl.program_id(1).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    residual += start_of(row, residual_stride, IS_ALIGNED)
    grad += start_of(row, grad_stride, IS_ALIGNED)
    lead = lead_of(row, residual_stride, IS_ALIGNED)
    start = tile.to(tl.int64) * TILE
    places = start + tl.arange(0, TILE)
    if (start >= lead) & (start + TILE <= lead + numel):
        keys = _accumulate(residual, grad, places, None, HAS_GRAD, KEY_BITS)
    else:
        mask = (places >= lead) & (places < lead + numel)
        keys = _accumulate(residual, grad, places, mask, HAS_GRAD, KEY_BITS)
    work += row * num_words
    is_candidate = keys >= tl.load(work + GUESS).to(keys.dtype)
    at_tile = row * tl.num_programs(0) + tile
    if IS_WIDE:
        is_above = keys >= tl.load(work + LIMIT).to(keys.dtype)
        is_candidate = is_candidate & (is_above == 0)
        tl.store(tile_above + at_tile, tl.sum(is_above.to(tl.int32)).to(tl.int64))
    if ROOM > 0:
        position = tl.cumsum(is_candidate.to(tl.int32), 0)
        num = tl.max(position, 0)
        if num > 0:
            slot = tl.where(is_candidate & (position <= ROOM), position, 0).to(tl.int16)
            here = slots + at_tile * ROOM - 1 + slot
            tl.store(here, tl.arange(0, TILE).to(tl.int16), mask=slot > 0)
    else:
        num = tl.sum(is_candidate.to(tl.int32))
    tl.store(tile_counts + at_tile, num.to(tl.int64))


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
    IS_ALIGNED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Move a tile's entries that reach the guess out, while there is room."""
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    at_tile = row * tl.num_programs(0) + tile
    before = tl.load(tile_stops + at_tile - 1, mask=tile > 0, other=0)
    if (tl.load(tile_stops + at_tile) > before) & (before < capacity):
        offsets = tile.to(tl.int64) * TILE + tl.arange(0, TILE) - lead_of(row, residual_stride, IS_ALIGNED)
        residual += row * residual_stride
        mask = (offsets >= 0) & (offsets < numel)
        a = tl.load(residual + offsets, mask=mask, other=0.0)
        is_found = (key_of(a, KEY_BITS) >= tl.load(work + row * num_words + GUESS)) & mask
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
