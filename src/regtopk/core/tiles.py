"""Parameters cut into tiles: pieces of a matrix that some algorithms treat as units.

A parameter is a matrix (`Layer.sides`). Each side is cut into as few pieces as possible, none longer than the
side of a tile. Pieces are equally long, or some are longer than the others by one entry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regtopk.core.selection import send_instead_, take_largest_per_chunk_
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layout


class TileBlock(NamedTuple):
    """Tiles of one shape that lie side by side in a matrix."""

    start: int  # of the first tile's first entry in the flat vector
    size: tuple[int, int, int, int]  # rows and columns of tiles, height and width of a tile
    row_numel: int  # entries of a row of the matrix

    @property
    def num_tiles(self) -> int:
        """How many tiles the block has."""
        return self.size[0] * self.size[1]

    def of(self, vector: Tensor) -> Tensor:
        """The block's tiles in a flat vector, (..., J), as a view: (..., *size)."""
        _, _, height, width = self.size
        *batch_strides, one = vector.stride()
        strides = height * self.row_numel * one, width * one, self.row_numel * one, one
        start = vector.storage_offset() + self.start * one
        return vector.as_strided((*vector.shape[:-1], *self.size), (*batch_strides, *strides), start)


@dataclass(frozen=True)
class TileGroup:
    """All tiles of one shape, of all parameters."""

    shape: tuple[int, int]
    blocks: tuple[TileBlock, ...]

    @property
    def tile_numel(self) -> int:
        """How many entries a tile has."""
        return self.shape[0] * self.shape[1]

    @property
    def numel(self) -> int:
        """How many entries all of them have."""
        return sum(block.num_tiles for block in self.blocks) * self.tile_numel

    def as_tiles(self, flat: Tensor) -> Tensor:
        """Tiles that lie one after the other, (..., numel), as (..., number, height, width)."""
        tiles: Tensor = flat.unflatten(-1, (-1, *self.shape))
        return tiles

    def read(self, vector: Tensor) -> Tensor:
        """A copy of the tiles of a flat vector: (..., J) gives (..., number, height, width)."""
        return torch.cat([block.of(vector).flatten(-4, -3) for block in self.blocks], dim=-3)

    def write_(self, vector: Tensor, tiles: Tensor) -> None:
        """Write tiles, (..., number, height, width), to their places in a flat vector, (..., J)."""
        parts = tiles.split([block.num_tiles for block in self.blocks], dim=-3)
        for block, part in zip(self.blocks, parts, strict=True):
            block.of(vector).copy_(part.unflatten(-3, block.size[:2]))


@lru_cache(maxsize=256)
def tiles_of(layout: Layout, side: int) -> tuple[TileGroup, ...]:
    """The tiles of a layout, of up to side x side entries, grouped by their shape."""
    groups: dict[tuple[int, int], list[TileBlock]] = {}
    for layer in layout.layers:
        if layer.numel == 0:
            continue
        height, width = layer.sides
        for top, num_rows, row_length in pieces(height, side):
            for left, num_columns, column_length in pieces(width, side):
                size = num_rows, num_columns, row_length, column_length
                block = TileBlock(layer.start + top * width + left, size, width)
                groups.setdefault((row_length, column_length), []).append(block)
    return tuple(TileGroup(shape, tuple(blocks)) for shape, blocks in groups.items())


def take_largest_per_tile_(
    residual: Tensor, changes: Sequence[Tensor], groups: Sequence[TileGroup], density: float, *, code: str
) -> SparseGradient:
    """residual := residual + change - sent, where sent holds the largest entries of every tile.

    Args:
        residual: (..., J), changed in place.
        changes: what is added to each group's tiles, (..., number, height, width).
        groups: all tiles.
        density: share of a tile's entries that is sent: max(1, round(density entries)).
        code: how values are coded; the residual gets back what it loses.

    Returns:
        What is sent. It counts entries in the order of tiles, one group after the other: `from_tiles` puts a
        sum of it back in place.
    """
    tiles = torch.cat([group.read(residual).flatten(-3) for group in groups], -1)
    parts = tiles.split([group.numel for group in groups], -1)
    taken, start = [], 0
    for group, part, change in zip(groups, parts, changes, strict=True):
        k = max(1, round(density * group.tile_numel))
        found = take_largest_per_chunk_(part, change.flatten(-3), group.tile_numel, k)
        taken.append((found.indices + start, found.values))
        start += group.numel
    indices, values = (torch.cat(both, -1) for both in zip(*taken, strict=True))
    # Coded as one message: blocks of a code run across groups.
    sent = send_instead_(tiles, SparseGradient(indices, values, tiles.shape[-1]), values, code)
    for group, part in zip(groups, parts, strict=True):
        group.write_(residual, group.as_tiles(part))
    return sent


def from_tiles(
    flat: Tensor, groups: Sequence[TileGroup], transform: Callable[[Tensor], Tensor] = lambda tiles: tiles
) -> Tensor:
    """A vector in the order of tiles, (..., J), put back in place; each group's tiles are transformed."""
    vector = torch.empty_like(flat)
    for group, part in zip(groups, flat.split([group.numel for group in groups], -1), strict=True):
        group.write_(vector, transform(group.as_tiles(part)))
    return vector


def pieces(numel: int, longest: int) -> list[tuple[int, int, int]]:
    """A side cut into as few pieces as possible: start, number and length of the longer, then the shorter."""
    number = -(-numel // longest)
    shorter, num_longer = divmod(numel, number)
    longer = [(0, num_longer, shorter + 1)] if num_longer else []
    return [*longer, (num_longer * (shorter + 1), number - num_longer, shorter)]
