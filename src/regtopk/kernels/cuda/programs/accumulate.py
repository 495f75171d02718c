"""Triton programs that pass over all entries once: they accumulate, and count or take entries."""

import triton
import triton.language as tl

from regtopk.kernels.cuda.programs.damping import exchange, first_of_tile, load_damped, put
from regtopk.kernels.cuda.programs.tiles import bounds_of, keys_of, lead_of, load_tile, start_of, store_tile
from regtopk.kernels.cuda.programs.words import GUESS, LIMIT, SIZES, key_of, leading_bits_of_rank


@triton.jit
def _side_of(keys, guess, limit, IS_WIDE: tl.constexpr):
    """Whether keys reach the guess (1), and the limit (2 more)."""
    side = (keys >= guess).to(tl.int32)
    if IS_WIDE:
        side += 2 * (keys >= limit).to(tl.int32)
    return side


@triton.jit(do_not_specialize=SIZES)
def accumulate(
    residual, grad, work, tile_counts, tile_above, slots, damped, scores, saved, damped_starts, numel,
    num_damped, residual_stride, grad_stride, num_words, IS_ALIGNED: tl.constexpr, IS_WIDE: tl.constexpr,
    HAS_DAMPED: tl.constexpr, HAS_GRAD: tl.constexpr, KEY_BITS: tl.constexpr, ROOM: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """residual += grad on a tile; count its candidates, and keep where in it the first ROOM of them are.

    Damped entries are left with their scores. In a wide plan also count the entries that reach the limit.

    Programs start at the end of a row: a driver has just read the gradient, so its end may be in the cache.
    """
    row = tl.program_id(1).to(tl.int64)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    lead = lead_of(row, residual_stride, IS_ALIGNED)
    start = tile.to(tl.int64) * TILE
    first, stop = bounds_of(start, lead, numel, TILE)
    residual += start_of(row, residual_stride, IS_ALIGNED) + start
    grad += start_of(row, grad_stride, IS_ALIGNED) + start
    a = load_tile(residual, first, stop, TILE)
    if HAS_GRAD:
        g = load_tile(grad, first, stop, TILE)
    if HAS_DAMPED:  # what is looked up is on its way before anybody waits for the tile
        d_first, d_stop, j, score = first_of_tile(damped_starts, row, tile, damped, scores, num_damped, BLOCK)
    work += row * num_words
    guess, limit = tl.load(work + GUESS), tl.load(work + LIMIT)
    if HAS_GRAD:
        a = (a + g).to(a.dtype)
        store_tile(residual, a, first, stop, TILE)
    keys = keys_of(a, first, stop, KEY_BITS, TILE)
    if HAS_DAMPED:  # noqa: SIM102 - one is known to the compiler, the other is not
        if d_first < d_stop:
            tl.debug_barrier()  # all threads have stored
            moves = tl.zeros((BLOCK,), tl.int32)  # whether a score is on another side of the guess than a
            while d_first < d_stop:
                d = d_first + tl.arange(0, BLOCK)
                held = exchange(residual + (lead - start) + j, score, d < d_stop, KEY_BITS)
                tl.store(saved + d, held, mask=d < d_stop)
                was = _side_of(key_of(held, KEY_BITS), guess, limit, IS_WIDE)
                now = _side_of(key_of(score, KEY_BITS), guess, limit, IS_WIDE)
                moves = tl.where(d < d_stop, moves | (was ^ now), moves)
                d_first += BLOCK
                j, score = load_damped(damped, scores, d_first, d_stop, BLOCK)
            if tl.max(moves) > 0:
                tl.debug_barrier()
                i = tl.arange(0, TILE)
                inside = (i >= first) & (i < stop)
                a = tl.load(residual + i, mask=inside, other=0.0, cache_modifier=".cg")
                keys = keys_of(a, first, stop, KEY_BITS, TILE)
    is_candidate = keys >= guess.to(keys.dtype)
    at_tile = row * tl.num_programs(0) + tile
    if IS_WIDE:
        is_above = keys >= limit.to(keys.dtype)
        is_candidate = is_candidate & (is_above == 0)
        tl.store(tile_above + at_tile, tl.sum(is_above.to(tl.int32)))
    if ROOM > 0:
        position = tl.cumsum(is_candidate.to(tl.int32), 0)
        num = tl.max(position, 0)
        if num > 0:
            slot = tl.where(is_candidate & (position <= ROOM), position, 0).to(tl.int16)
            here = slots + at_tile * ROOM - 1 + slot
            tl.store(here, tl.arange(0, TILE).to(tl.int16), mask=slot > 0)
    else:
        num = tl.sum(is_candidate.to(tl.int32))
    tl.store(tile_counts + at_tile, num)


@triton.jit(do_not_specialize=SIZES)
def write_above(
    residual, work, tile_stops, indices, values, numel, capacity, residual_stride, num_words,
    IS_ALIGNED: tl.constexpr, KEY_BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
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
    residual, grad, indices, values, damped, scores, damped_starts, numel, num_damped, chunk, k,
    num_taken, residual_stride, grad_stride, HAS_DAMPED: tl.constexpr, KEY_BITS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Accumulate a chunk, and move its k largest out; `num_taken` a row, `SIZE` >= chunk."""
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    start = tile.to(tl.int64) * chunk
    stop = tl.minimum(start + chunk, numel)
    offsets = start + tl.arange(0, SIZE)
    mask = offsets < stop
    residual += row * residual_stride
    a = tl.load(residual + offsets, mask=mask, other=0.0)
    a = (a + tl.load(grad + row * grad_stride + offsets, mask=mask, other=0.0)).to(a.dtype)
    key = tl.where(mask, key_of(a, KEY_BITS), -1)
    if HAS_DAMPED:
        first, last, j, score = first_of_tile(damped_starts, row, tile, damped, scores, num_damped, BLOCK)
        if first < last:
            tl.store(residual + offsets, a, mask=mask)
            put(residual, damped, scores, first, last, j, score, BLOCK)
            scored = tl.load(residual + offsets, mask=mask, other=0.0, cache_modifier=".cg")
            key = tl.where(mask, key_of(scored, KEY_BITS), -1)
            tl.debug_barrier()  # all threads have read, before one writes
    wanted = tl.minimum(k, stop - start)
    threshold = leading_bits_of_rank(key, wanted, KEY_BITS, KEY_BITS)
    is_equal = (key == threshold).to(tl.int32)
    wanted_equal = wanted - tl.sum((key > threshold).to(tl.int32))
    is_taken = (key > threshold) | ((is_equal != 0) & (tl.cumsum(is_equal, 0) <= wanted_equal))
    position = row * num_taken + tile.to(tl.int64) * k
    position += tl.cumsum(is_taken.to(tl.int32), 0) - 1
    tl.store(indices + position, offsets, mask=is_taken)
    tl.store(values + position, a, mask=is_taken)
    tl.store(residual + offsets, tl.where(is_taken, 0.0, a), mask=mask)
