"""Triton programs that move entries out of a whole row, a tile by each program.

`selection` does the same for candidates, which are few. The counts of a row are those above the
threshold, of all tiles, then those equal to it.
"""

import triton
import triton.language as tl

from regtopk.kernels.cuda.programs.damping import first_of_tile, put
from regtopk.kernels.cuda.programs.selection import next_prefix
from regtopk.kernels.cuda.programs.tiles import bounds_of, keys_of, lead_of, load_tile, start_of
from regtopk.kernels.cuda.programs.words import PREFIX, SIZES, WANTED, is_enough

FEW = tl.constexpr(16)  # candidates of a tile that are counted together


@triton.jit
def settle(work, num_words, KEY_BITS: tl.constexpr):
    """Settle the last digit, and thereby the threshold."""
    work += tl.program_id(1).to(tl.int64) * num_words
    threshold, wanted = next_prefix(work, (KEY_BITS - 7) // 8)
    tl.store(work + PREFIX, threshold)
    tl.store(work + WANTED, wanted)


@triton.jit(do_not_specialize=SIZES)
def count_moved(
    residual, work, taken, tile_counts, tile_stops, tile_above, keys, numel, k, capacity, num_tiles,
    residual_stride, num_words, IS_ALIGNED: tl.constexpr, IS_WIDE: tl.constexpr, KEY_BITS: tl.constexpr,
    TILE: tl.constexpr, NUM_TILES: tl.constexpr,
):  # fmt: skip
    """Count the keys of NUM_TILES tiles that are above the threshold, and those equal to it.

    Where the candidates suffice, what reaches the limit was counted before, and only they are looked at.
    """
    row = tl.program_id(1).to(tl.int64)
    work += row * num_words
    threshold = tl.load(work + PREFIX)
    taken += 2 * row * num_tiles
    if IS_WIDE & is_enough(work, k, capacity):
        tile = tl.program_id(0) * NUM_TILES + tl.arange(0, NUM_TILES)
        at_tile, is_there = row * num_tiles + tile, tile < num_tiles
        above = tl.load(tile_above + at_tile, mask=is_there, other=0)
        equal = tl.zeros_like(above)
        num = tl.load(tile_counts + at_tile, mask=is_there, other=0)
        first = tl.load(tile_stops + at_tile, mask=is_there, other=0) - num
        for start in range(0, tl.max(num), FEW):
            i = start + tl.arange(0, FEW)[None, :]
            key = tl.load(keys + row * capacity + first[:, None] + i, mask=i < num[:, None], other=-1)
            above += tl.sum((key > threshold).to(tl.int32), 1)
            equal += tl.sum((key == threshold).to(tl.int32), 1)
        tl.store(taken + tile, above, mask=is_there)
        tl.store(taken + num_tiles + tile, equal, mask=is_there)
    else:
        residual += start_of(row, residual_stride, IS_ALIGNED)
        for n in range(NUM_TILES):
            tile = tl.program_id(0) * NUM_TILES + n
            if tile < num_tiles:
                start = tile.to(tl.int64) * TILE
                first, stop = bounds_of(start, lead_of(row, residual_stride, IS_ALIGNED), numel, TILE)
                key = keys_of(load_tile(residual + start, first, stop, TILE), first, stop, KEY_BITS, TILE)
                tl.store(taken + tile, tl.sum((key > threshold).to(tl.int32)).to(tl.int64))
                tl.store(taken + num_tiles + tile, tl.sum((key == threshold).to(tl.int32)).to(tl.int64))


@triton.jit(do_not_specialize=SIZES)
def move_out(
    residual, work, taken, stops, indices, values, damped, saved, damped_starts, numel, k, num_damped,
    residual_stride, num_words, IS_ALIGNED: tl.constexpr, HAS_DAMPED: tl.constexpr, KEY_BITS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move a tile's entries above the threshold out, and the first of those equal to it."""
    row = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    lead = lead_of(row, residual_stride, IS_ALIGNED)
    start = tile.to(tl.int64) * TILE
    first, last = bounds_of(start, lead, numel, TILE)
    residual += start_of(row, residual_stride, IS_ALIGNED) + start
    a = load_tile(residual, first, last, TILE)
    if HAS_DAMPED:  # what is looked up is on its way before anybody waits for the tile
        d_first, d_stop, j, held = first_of_tile(damped_starts, row, tile, damped, saved, num_damped, BLOCK)
    work += row * num_words
    threshold, wanted = tl.load(work + PREFIX), tl.load(work + WANTED)
    at = 2 * row * tl.num_programs(0) + tile
    before = tl.load(stops + at) - tl.load(taken + at)
    num_above = tl.load(stops + (2 * row + 1) * tl.num_programs(0) - 1)
    num_equal = tl.load(taken + at + tl.num_programs(0))
    equal_before = tl.load(stops + at + tl.num_programs(0)) - num_equal - num_above
    key = keys_of(a, first, last, KEY_BITS, TILE)
    is_taken = key > threshold
    if num_equal > 0:
        is_equal = (key == threshold).to(tl.int32)
        num_wanted = tl.minimum(tl.maximum(wanted - equal_before, 0), TILE).to(tl.int32)
        is_taken = is_taken | ((is_equal > 0) & (tl.cumsum(is_equal, 0) <= num_wanted))
    i = tl.arange(0, TILE)
    if HAS_DAMPED:  # noqa: SIM102 - one is known to the compiler, the other is not
        if d_first < d_stop:
            put(residual + (lead - start), damped, saved, d_first, d_stop, j, held, BLOCK)
            a = tl.load(residual + i, mask=(i >= first) & (i < last), other=0.0, cache_modifier=".cg")
            tl.debug_barrier()  # all threads have read, before one writes
    position = row * k + before + tl.minimum(equal_before, wanted) - 1 + tl.cumsum(is_taken.to(tl.int32), 0)
    tl.store(indices + position, start - lead + i, mask=is_taken)
    tl.store(values + position, a, mask=is_taken)
    tl.store(residual + i, tl.zeros_like(a), mask=is_taken)
