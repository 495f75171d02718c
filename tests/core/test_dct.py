"""The cosine transform against its formula, and the tiles it is made of, read and written where they lie."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regtopk.core import dct as module
from regtopk.core.dct import dct, inverse_dct
from regtopk.core.tiles import pieces, tiles_of
from regtopk.core.worker import Layout
from tests.algorithms.cases import normal


def by_formula(tile: Tensor) -> Tensor:
    """X_uv = s_u s_v sum_ij x_ij cos(pi (2i + 1) u / 2h) cos(pi (2j + 1) v / 2w), sum by sum, in float64."""

    def along_rows(rows: list[list[float]]) -> list[list[float]]:
        n = len(rows[0])
        return [
            [
                math.sqrt((2 if u else 1) / n)
                * math.fsum(x * math.cos(math.pi * (2 * i + 1) * u / (2 * n)) for i, x in enumerate(row))
                for u in range(n)
            ]
            for row in rows
        ]

    columns = along_rows(torch.tensor(along_rows(tile.tolist()), dtype=torch.float64).t().tolist())
    return torch.tensor(columns, dtype=torch.float64).t()


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (64, 64), (33, 50), (7, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """An entry is rounded to 2^-24 of the tile's power of two, twice, and C to 2^-26.

    An error of one entry spreads over a side of n with weights of norm 1, so errors of n entries together
    stay below sqrt(n) times their bound. Rounding the result to float32 adds 2^-24 of it.
    """
    tile = normal(1, *shape, dtype=dtype)
    expected = by_formula(tile[0])
    largest = max(float(tile.abs().max()), float(expected.abs().max()))
    bound = 8 * math.sqrt(max(shape)) * 2.0**-24 * largest
    coefficients = dct(tile)
    assert coefficients.dtype == dtype
    assert float((coefficients[0] - expected).abs().max()) <= bound
    assert float((inverse_dct(coefficients) - tile).abs().max()) <= 2 * bound


@pytest.mark.parametrize("transform", [dct, inverse_dct])
def test_batch_and_slabs_do_not_touch_the_bits(
    transform: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = normal(3, 10, 40, 64) * torch.logspace(-12, 12, 10)[:, None, None]
    together = transform(tiles)
    for row, batch in zip(tiles, together, strict=True):
        for tile, expected in zip(row, batch, strict=True):
            assert torch.equal(transform(tile.unsqueeze(0))[0], expected)
    monkeypatch.setattr(module, "_TILES_AT_ONCE", 3)
    assert torch.equal(transform(tiles), together)


def test_sums_are_exact_in_the_worst_case() -> None:
    """A tile of the largest whole numbers, 2^24 - 1. The first row of C, 64 times 2^23, adds them to 2^53."""
    largest = torch.full((1, 64, 64), 1.0 - 2.0**-24, dtype=torch.float64)
    assert float(dct(largest)[0, 0, 0]) == 64 * (1.0 - 2.0**-24)


@pytest.mark.parametrize("size", [0.0, 1e-300, 1e-45, 1e38])
def test_sizes_at_the_end_of_the_range(size: float) -> None:
    tiles = torch.full((1, 2, 2), size, dtype=torch.float64)
    torch.testing.assert_close(dct(tiles)[0, 0, 0], tiles[0, 0, 0] * 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_does_not_become_finite(bad: float) -> None:
    tiles = torch.ones(1, 4, 4)
    tiles[0, 1, 2] = bad
    assert not bool(dct(tiles).isfinite().any())


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
    vectors = normal(2, 3, LAYOUT.numel)
    assert sum(group.numel for group in groups) == LAYOUT.numel
    written = torch.full_like(vectors, torch.nan)
    for group in groups:
        assert max(group.shape) <= side
        tiles = group.read(vectors)
        assert tiles.shape == (2, 3, group.numel // math.prod(group.shape), *group.shape)
        group.write_(written, tiles)
    assert torch.equal(written, vectors)
