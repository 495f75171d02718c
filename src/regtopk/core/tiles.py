"""Parameters cut into tiles: pieces of a matrix that some algorithms treat as units.

A parameter is a matrix (`Layer.sides`). Each side is cut into as few pieces as possible, none longer than the
side of a tile. Pieces are equally long, or some are longer than the others by one entry.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from regtopk.core.sparse import SparseGradient, send_instead_, take_largest_
from regtopk.core.worker import Layer, Layout


@dataclass(frozen=True)
class TileGroup:
    """All tiles of one shape, of all parameters."""

    shape: tuple[int, int]
    parts: tuple[tuple[Layer, slice, slice], ...]  # rows and columns of a matrix: tiles that lie side by side
    numel: int

    def in_place(self, vector: Tensor) -> list[Tensor]:
        """The tiles of each part as a view of a flat vector: (..., J) gives (..., rows, columns, *shape)."""
        height, width = self.shape
        views = []
        for layer, rows, columns in self.parts:
            matrix = vector[..., layer.entries].unflatten(-1, layer.sides)[..., rows, columns]
            views.append(matrix.unflatten(-1, (-1, width)).unflatten(-3, (-1, height)).transpose(-3, -2))
        return views

    def read(self, vector: Tensor) -> Tensor:
        """A copy of the tiles of a flat vector: (..., J) gives (..., number, height, width)."""
        return torch.cat([view.flatten(-4, -3) for view in self.in_place(vector)], dim=-3)

    def write_(self, vector: Tensor, tiles: Tensor) -> None:
        """Write tiles, (..., number, height, width), to their places in a flat vector, (..., J)."""
        for view in self.in_place(vector):
            grid = view.shape[-4:-2]
            part, tiles = tiles.tensor_split([grid.numel()], dim=-3)
            view.copy_(part.unflatten(-3, grid))


@lru_cache(maxsize=256)
def tiles_of(layout: Layout, side: int) -> tuple[TileGroup, ...]:
    """The tiles of a layout, of up to side x side entries, grouped by their shape."""
    groups: dict[tuple[int, int], list[tuple[Layer, slice, slice]]] = {}
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for layer in layout.layers:
        if layer.numel == 0:
            continue
        height, width = layer.sides
        for rows, row_length in pieces(height, side):
            for columns, column_length in pieces(width, side):
                shape = row_length, column_length
                groups.setdefault(shape, []).append((layer, rows, columns))
                sizes[shape] += (rows.stop - rows.start) * (columns.stop - columns.start)
    return tuple(TileGroup(shape, tuple(parts), sizes[shape]) for shape, parts in groups.items())


def take_largest_per_tile_(
    residual: Tensor, changes: Sequence[Tensor], groups: Sequence[TileGroup], density: float, *, code: str
) -> SparseGradient:
    """residual := residual + change - sent, where sent holds the largest entries of every tile.

    Of a tile max(1, round(density entries)) are sent. A change is what is added to the tiles of a group,
    (..., number, height, width). What is sent counts entries in the order of tiles, one group after the
    other: `from_tiles` puts a sum of it back in place.
    """
    tiles = torch.cat([group.read(residual).flatten(-3) for group in groups], -1)
    parts = tiles.split([group.numel for group in groups], -1)
    taken, start = [], 0
    for group, part, change in zip(groups, parts, changes, strict=True):
        tile_numel = math.prod(group.shape)
        k = max(1, round(density * tile_numel))
        found = take_largest_(part, change.flatten(-3), k, chunk=tile_numel)
        taken.append((found.indices + start, found.values))
        start += group.numel
    indices, values = (torch.cat(both, -1) for both in zip(*taken, strict=True))
    # Coded as one message: blocks of a code run across groups.
    sent = send_instead_(tiles, SparseGradient(indices, values, tiles.shape[-1]), values, code)
    for group, part in zip(groups, parts, strict=True):
        group.write_(residual, part.unflatten(-1, (-1, *group.shape)))
    return sent


def from_tiles(
    flat: Tensor, groups: Sequence[TileGroup], transform: Callable[[Tensor], Tensor] = lambda tiles: tiles
) -> Tensor:
    """A vector in the order of tiles, (..., J), put back in place; each group's tiles are transformed."""
    vector = torch.empty_like(flat)
    for group, part in zip(groups, flat.split([group.numel for group in groups], -1), strict=True):
        group.write_(vector, transform(part.unflatten(-1, (-1, *group.shape))))
    return vector


def pieces(numel: int, longest: int) -> list[tuple[slice, int]]:
    """A side cut into as few pieces as possible: the slice and the length of the longer, then the shorter."""
    number = -(-numel // longest)
    shorter, num_longer = divmod(numel, number)
    middle = num_longer * (shorter + 1)
    longer = [(slice(0, middle), shorter + 1)] if num_longer else []
    return [*longer, (slice(middle, numel), shorter)]
