"""A tile: the entries of a row that one Triton program works on.

Tiles of a row that does not start at 16 bytes may start a few entries before it: then they are aligned.
"""

import triton
import triton.language as tl

from regtopk.kernels.cuda.programs.words import key_of


@triton.jit
def start_of(row, stride, IS_ALIGNED: tl.constexpr):
    """Where a row's tiles start, counted from the first row; a multiple of 4 lets loads be 16 bytes wide."""
    start = row * stride
    if IS_ALIGNED:
        start = start // 4 * 4
    return start


@triton.jit
def lead_of(row, stride, IS_ALIGNED: tl.constexpr):
    """How many entries of the row before belong to the first tile."""
    return row * stride - start_of(row, stride, IS_ALIGNED)


@triton.jit
def bounds_of(start, lead, numel, TILE: tl.constexpr):
    """Which entries of a tile that begins at `start` are the row's: from the first number to the second."""
    first = tl.maximum(lead - start, 0).to(tl.int32)
    return first, tl.minimum(lead + numel - start, TILE).to(tl.int32)


@triton.jit
def load_tile(tile, first, stop, TILE: tl.constexpr):
    """A tile's entries, zero outside of the row. Loads without a mask are 16 bytes wide."""
    i = tl.arange(0, TILE)
    if (first == 0) & (stop == TILE):
        entries = tl.load(tile + i)
    else:
        entries = tl.load(tile + i, mask=(i >= first) & (i < stop), other=0.0)
    return entries


@triton.jit
def store_tile(tile, entries, first, stop, TILE: tl.constexpr):
    """Write a tile's entries."""
    i = tl.arange(0, TILE)
    if (first == 0) & (stop == TILE):
        tl.store(tile + i, entries)
    else:
        tl.store(tile + i, entries, mask=(i >= first) & (i < stop))


@triton.jit
def keys_of(entries, first, stop, KEY_BITS: tl.constexpr, TILE: tl.constexpr):
    """The keys of a tile's entries, -1 outside of the row."""
    i = tl.arange(0, TILE)
    return tl.where((i >= first) & (i < stop), key_of(entries, KEY_BITS), -1)
