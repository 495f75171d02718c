"""Parameters cut into tiles: pieces of a matrix that some algorithms treat as units.

A parameter of two dimensions is a matrix. One of more dimensions is a matrix of its first dimension against
the others, and a vector is a matrix of one row. Each side is cut into as few pieces as possible, none longer
than the side of a tile. Pieces are equally long, or some are longer than the others by one entry.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regtopk.core.selection import send_instead_, take_largest_per_chunk_
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layer, Layout


class Pieces(NamedTuple):
    """Equal pieces of a side that follow one another."""

    start: int
    number: int
    length: int

    @property
    def end(self) -> int:
        """Where the last of them ends."""
        return self.start + self.number * self.length


class Block(NamedTuple):
    """Tiles of one shape that lie side by side in a matrix."""

    layer: Layer
    rows: Pieces
    columns: Pieces

    @property
    def num_tiles(self) -> int:
        """How many tiles the block has."""
        return self.rows.number * self.columns.number

    def of(self, vector: Tensor) -> Tensor:
        """The block's tiles in a flat vector, (..., J), as a view: (..., rows, columns, height, width)."""
        layer, rows, columns = self.layer, self.rows, self.columns
        matrix = vector[..., layer.start : layer.start + layer.numel].unflatten(-1, _sides(layer))
        block = matrix[..., rows.start : rows.end, columns.start : columns.end]
        in_rows = block.unflatten(-2, (rows.number, rows.length))
        in_tiles: Tensor = in_rows.unflatten(-1, (columns.number, columns.length))
        return in_tiles.transpose(-3, -2)


@dataclass(frozen=True)
class TileGroup:
    """All tiles of one shape, of all parameters."""

    height: int
    width: int
    blocks: tuple[Block, ...]

    @property
    def num_tiles(self) -> int:
        """How many tiles have this shape."""
        return sum(block.num_tiles for block in self.blocks)

    @property
    def tile_numel(self) -> int:
        """How many entries a tile has."""
        return self.height * self.width

    @property
    def numel(self) -> int:
        """How many entries all of them have."""
        return self.num_tiles * self.tile_numel

    def as_tiles(self, flat: Tensor) -> Tensor:
        """Tiles that lie one after the other, (..., numel), as (..., num_tiles, height, width)."""
        tiles: Tensor = flat.unflatten(-1, (self.num_tiles, self.height, self.width))
        return tiles

    def read(self, vector: Tensor) -> Tensor:
        """A copy of the tiles of a flat vector: (..., J) gives (..., num_tiles, height, width)."""
        tiles = vector.new_empty(*vector.shape[:-1], self.num_tiles, self.height, self.width)
        for block, part in self._blocks_and_parts(tiles):
            part.copy_(block.of(vector))
        return tiles

    def write_(self, vector: Tensor, tiles: Tensor) -> None:
        """Write tiles, (..., num_tiles, height, width), to their places in a flat vector, (..., J)."""
        for block, part in self._blocks_and_parts(tiles):
            block.of(vector).copy_(part)

    def _blocks_and_parts(self, tiles: Tensor) -> list[tuple[Block, Tensor]]:
        parts = torch.split(tiles, [block.num_tiles for block in self.blocks], dim=-3)
        return [
            (block, part.unflatten(-3, (block.rows.number, block.columns.number)))
            for block, part in zip(self.blocks, parts, strict=True)
        ]


@lru_cache(maxsize=256)
def tiles_of(layout: Layout, side: int) -> tuple[TileGroup, ...]:
    """The tiles of a layout, of up to side x side entries, grouped by their shape."""
    groups: dict[tuple[int, int], list[Block]] = {}
    for layer in layout.layers:
        if layer.numel == 0:
            continue
        height, width = _sides(layer)
        for rows in pieces(height, side):
            for columns in pieces(width, side):
                groups.setdefault((rows.length, columns.length), []).append(Block(layer, rows, columns))
    return tuple(TileGroup(*shape, tuple(blocks)) for shape, blocks in groups.items())


def take_largest_per_tile_(
    residual: Tensor, changes: Sequence[Tensor], groups: Sequence[TileGroup], density: float, *, code: str
) -> SparseGradient:
    """residual := residual + change - sent, where sent holds the largest entries of every tile.

    Args:
        residual: (..., J), changed in place.
        changes: what is added to each group's tiles, (..., num_tiles, height, width).
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
    flat: Tensor, groups: Sequence[TileGroup], transform: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """A vector in the order of tiles, (..., J), put back in place; each group is transformed if asked."""
    vector = torch.empty_like(flat)
    for group, part in zip(groups, flat.split([group.numel for group in groups], -1), strict=True):
        tiles = group.as_tiles(part)
        group.write_(vector, tiles if transform is None else transform(tiles))
    return vector


def pieces(numel: int, longest: int) -> list[Pieces]:
    """A side of `numel` entries cut into as few pieces as possible: the longer ones, then the shorter."""
    number = -(-numel // longest)
    shorter, num_longer = divmod(numel, number)
    cut = [Pieces(0, num_longer, shorter + 1)] if num_longer else []
    return [*cut, Pieces(num_longer * (shorter + 1), number - num_longer, shorter)]


def _sides(layer: Layer) -> tuple[int, int]:
    if len(layer.shape) < 2:
        return 1, layer.numel
    return layer.shape[0], layer.numel // layer.shape[0]
