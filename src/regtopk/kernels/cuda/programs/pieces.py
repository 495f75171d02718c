"""Triton programs for a vector that lies in pieces: a table says where each piece is."""

import triton
import triton.language as tl

from regtopk.kernels.cuda.programs.words import SIZES


@triton.jit(do_not_specialize=SIZES)
def join(
    vector, first, addresses, start_addresses, starts, tile_pieces, tile_starts, num_bad,
    HAS_START: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy a tile, which is part of one piece, into the vector, or subtract it from another.

    Tell if an entry is NaN or inf. `first` is any piece: all have its type. Piece p holds the entries from
    starts[p] to starts[p + 1].
    """
    tile = tl.program_id(0)
    piece = tl.load(tile_pieces + tile)
    start = tl.load(starts + piece)
    places = tl.load(tile_starts + tile) + tl.arange(0, TILE)
    mask = places < tl.load(starts + piece + 1)
    source = tl.load(addresses + piece).to(first.dtype)
    entries = tl.load(source + (places - start), mask=mask, other=0.0).to(vector.dtype.element_ty)
    if HAS_START:
        subtracted_from = tl.load(start_addresses + piece).to(first.dtype)
        entries = tl.load(subtracted_from + (places - start), mask=mask, other=0.0) - entries
    tl.store(vector + places, entries, mask=mask)
    if tl.max((tl.abs(entries) < float("inf")).to(tl.int32) ^ 1) > 0:
        tl.store(num_bad, 1)


@triton.jit
def overwrite(
    flag, first, addresses, source_addresses, starts, tile_pieces, tile_starts, HAS_SOURCE: tl.constexpr,
    IS_NAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write a source, NaN or zero over a tile, if the flag says so: else nothing is read or written."""
    if tl.load(flag) != 0:
        tile = tl.program_id(0)
        piece = tl.load(tile_pieces + tile)
        places = tl.load(tile_starts + tile) + tl.arange(0, TILE)
        mask = places < tl.load(starts + piece + 1)
        places -= tl.load(starts + piece)
        if HAS_SOURCE:
            source = tl.load(source_addresses + piece).to(first.dtype)
            entries = tl.load(source + places, mask=mask, other=0.0)
        else:
            entries = tl.full((TILE,), float("nan") if IS_NAN else 0.0, tl.float32)
            entries = entries.to(first.dtype.element_ty)
        tl.store(tl.load(addresses + piece).to(first.dtype) + places, entries, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def scatter(
    vector, first, addresses, starts, indices, num_taken, NUM_PIECES: tl.constexpr,
    NUM_STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the vector's entries at the given indices to the pieces they belong to."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_taken
    index = tl.load(indices + i, mask=mask, other=0)
    piece = tl.zeros((BLOCK,), tl.int32)  # the last one that starts at the index or before
    for step in tl.static_range(NUM_STEPS):
        following = piece + (1 << (NUM_STEPS - 1 - step))
        is_there = following < NUM_PIECES
        start = tl.load(starts + following, mask=is_there, other=0)
        piece = tl.where(is_there & (start <= index), following, piece)
    target = tl.load(addresses + piece).to(first.dtype)
    entries = tl.load(vector + index, mask=mask, other=0.0)
    tl.store(target + (index - tl.load(starts + piece)), entries.to(first.dtype.element_ty), mask=mask)
