"""How parameters are cut into tiles, and that tiles are read and written where they lie."""

import math

import pytest
import torch

from regtopk.core.tiles import pieces, tiles_of
from regtopk.core.worker import Layout

LAYOUT = Layout.of_shapes(
    [
        ("matrix", (4, 6), "linear"),
        ("bias", (7,), "bias"),
        ("empty", (0, 3), "other"),
        ("scalar", (), "other"),
        ("conv", (2, 3, 1, 2), "conv"),
    ]
)


@pytest.mark.parametrize(
    ("numel", "expected"),
    [
        (1, [(slice(0, 1), 1)]),
        (64, [(slice(0, 64), 64)]),
        (192, [(slice(0, 192), 64)]),
        (100, [(slice(0, 100), 50)]),
        (65, [(slice(0, 33), 33), (slice(33, 65), 32)]),
        (131, [(slice(0, 88), 44), (slice(88, 131), 43)]),  # a prime
    ],
)
def test_sides_are_cut_into_few_and_even_pieces(numel: int, expected: list[tuple[slice, int]]) -> None:
    assert pieces(numel, 64) == expected


def test_tiles_by_hand() -> None:
    """Sides of 3: 4 = 2 + 2, 6 = 3 + 3 and 7 = 3 + 2 + 2; the kernel of 2 x 3 x 1 x 2 is 2 x 6."""
    groups = {group.shape: group for group in tiles_of(LAYOUT, 3)}
    vector = torch.arange(44)
    assert set(groups) == {(2, 3), (1, 3), (1, 2), (1, 1)}
    assert groups[2, 3].read(vector).tolist() == [
        [[0, 1, 2], [6, 7, 8]],
        [[3, 4, 5], [9, 10, 11]],
        [[12, 13, 14], [18, 19, 20]],
        [[15, 16, 17], [21, 22, 23]],
        [[32, 33, 34], [38, 39, 40]],
        [[35, 36, 37], [41, 42, 43]],
    ]
    assert groups[1, 3].read(vector).tolist() == [[[24, 25, 26]]]
    assert groups[1, 2].read(vector).tolist() == [[[27, 28]], [[29, 30]]]
    assert groups[1, 1].read(vector).tolist() == [[[31]]]


@pytest.mark.parametrize("side", [1, 2, 5, 64])
def test_tiles_cover_every_entry_once_and_go_back_where_they_were(side: int) -> None:
    groups = tiles_of(LAYOUT, side)
    vectors = torch.randn(2, 3, LAYOUT.numel, generator=torch.Generator().manual_seed(0))
    assert sum(group.numel for group in groups) == LAYOUT.numel
    written = torch.full_like(vectors, torch.nan)
    for group in groups:
        assert max(group.shape) <= side
        tiles = group.read(vectors)
        assert tiles.shape == (2, 3, group.numel // math.prod(group.shape), *group.shape)
        group.write_(written, tiles)
    assert torch.equal(written, vectors)
