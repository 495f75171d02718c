"""Pieces become one vector and back, whatever their memory is like; and a NaN or inf is never missed."""

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk import kernels
from regtopk.kernels import Support
from regtopk.kernels.dispatch import kernel_named

SHAPES = [(300, 401), (7,), (0,), (64, 3, 5, 5), (150_001,), (1,)]
KERNELS = ["reference", "cpu", "cuda"]
DTYPES = [torch.float32, torch.float64]
Make = Callable[[torch.dtype], list[Tensor]]


@pytest.fixture(autouse=True)
def fewer_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's interpreter takes long for each."""
    pieces = import_module("regtopk.kernels.cuda.pieces")
    monkeypatch.setattr(pieces, "_TILE", 1 << 15)
    pieces._tiles.cache_clear()
    yield
    pieces._tiles.cache_clear()


def kernel(name: str) -> Any:
    return import_module(f"regtopk.kernels.{name}.pieces")


def pieces_of(dtype: torch.dtype) -> list[Tensor]:
    """Among them a 16-bit one, a transposed one and one whose channels come last."""
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    pieces[0] = pieces[0].t().contiguous().t()
    pieces[3] = pieces[3].to(memory_format=torch.channels_last)
    pieces[4] = pieces[4].bfloat16()
    return pieces


def alike(dtype: torch.dtype) -> list[Tensor]:
    """Pieces that one program can read: of one type, and each one piece of memory."""
    return [piece.to(dtype).contiguous() for piece in pieces_of(dtype)]


def halves(dtype: torch.dtype) -> list[Tensor]:
    """Pieces of one type, which has half of the vector's bits."""
    return alike(torch.bfloat16 if dtype == torch.float32 else torch.float32)


@pytest.mark.parametrize("make", [pieces_of, alike])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_pieces_are_joined(name: str, dtype: torch.dtype, make: Make) -> None:
    pieces = make(dtype)
    expected = torch.cat([piece.flatten().to(dtype) for piece in pieces])
    vector = torch.full_like(expected, math.nan)
    assert bool(kernel(name).join_(vector, pieces))
    assert torch.equal(vector, expected)


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # from Triton's interpreter
@pytest.mark.parametrize("make", [pieces_of, alike])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_pieces_are_subtracted(name: str, dtype: torch.dtype, make: Make) -> None:
    pieces, join_ = make(dtype), kernel(name).join_
    start = [torch.randn(piece.shape).to(dtype) for piece in pieces]
    rounded = [first.to(piece.dtype).to(dtype) for first, piece in zip(start, pieces, strict=True)]
    parts = [(r - piece.to(dtype)).flatten() for r, piece in zip(rounded, pieces, strict=True)]
    vector = torch.full((sum(map(torch.numel, pieces)),), math.nan, dtype=dtype)
    assert bool(join_(vector, pieces, start))
    assert torch.equal(vector, torch.cat(parts))
    for bad in (math.nan, math.inf, -math.inf):
        for tensors in (pieces, start):
            kept = tensors[1][3].clone()
            tensors[1][3] = bad
            assert not bool(join_(vector, pieces, start))
            tensors[1][3] = kept
    pieces[4].view(-1)[0] = math.nan  # all else is written all the same
    vector.fill_(math.nan)
    assert not bool(join_(vector, pieces, start))
    assert int(vector.isnan().sum()) == 1
    start[1][3] = pieces[1][3] = math.inf  # no difference, and not zero either
    assert not bool(join_(vector, pieces, start))


@pytest.mark.parametrize(
    ("where", "bad"),
    [
        ((0, 0), math.nan), ((0, 401 * 300 - 1), -math.inf), ((1, 3), math.inf), ((3, 17), -math.nan),
        ((4, 150_000), math.nan), ((5, 0), math.inf),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", KERNELS)
def test_a_bad_entry_is_found_anywhere(name: str, where: tuple[int, int], bad: float) -> None:
    for dtype, make in product(DTYPES, (pieces_of, alike)):
        pieces = make(dtype)
        piece, entry = pieces[where[0]], where[1]
        piece[tuple(int(i) for i in torch.unravel_index(torch.tensor(entry), piece.shape))] = bad
        vector = torch.zeros(sum(piece.numel() for piece in pieces), dtype=dtype)
        assert not bool(kernel(name).join_(vector, pieces))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
def test_the_largest_numbers_are_finite(name: str, dtype: torch.dtype) -> None:
    piece = torch.full((70_000,), torch.finfo(dtype).max, dtype=dtype)  # whose sum is not
    assert bool(kernel(name).join_(torch.empty_like(piece), [piece]))
    assert bool(kernels.is_finite(piece))
    piece[69_999] = -math.inf
    assert not bool(kernels.is_finite(piece))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("num_pieces", [1, len(SHAPES)])
@pytest.mark.parametrize("num_sent", [900, 9000])  # so many are copied with all others
@pytest.mark.parametrize("make", [pieces_of, alike, halves])
def test_a_sparse_vector_is_spread(
    name: str, dtype: torch.dtype, num_pieces: int, num_sent: int, make: Make
) -> None:
    pieces = kernels.Pieces(torch.full_like(piece, math.nan) for piece in make(dtype))
    numel = sum(piece.numel() for piece in pieces)
    if num_pieces == 1:
        pieces = kernels.Pieces([torch.full((numel,), math.nan, dtype=dtype)])
    assert not kernel(name).join_(torch.zeros(numel, dtype=dtype), pieces)  # as in a step, before
    generator = torch.Generator().manual_seed(1)
    indices = torch.stack([torch.randperm(numel, generator=generator)[:num_sent] for _ in range(3)])
    indices[1, :10] = indices[0, :10]  # some in two rows
    indices[2, :2] = torch.tensor([0, numel - 1])
    counts = torch.tensor([num_sent, 700, num_sent])
    rows = [row[:count].sort().values for row, count in zip(indices, counts, strict=True)]
    indices = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    vector = torch.zeros(numel, dtype=dtype)
    for row in rows:
        entries = torch.randn(row.numel(), generator=generator)
        vector[row] = entries.bfloat16().to(dtype)  # Triton's interpreter does not round
    kernel(name).spread_(pieces, vector, Support(indices, counts))
    for piece, part in zip(pieces, kernels.parts_of(vector, pieces), strict=True):
        assert torch.equal(piece, part.to(piece.dtype))


@pytest.mark.parametrize("make", [pieces_of, alike])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["reference", "cuda"])
def test_pieces_are_overwritten_if_a_flag_says_so(name: str, dtype: torch.dtype, make: Make) -> None:
    before = make(dtype)
    for flag, entry in product((False, True), (0.0, math.nan, 7.0)):
        pieces, source = ([piece.clone() for piece in before] for _ in range(2))
        written = [piece.fill_(entry) for piece in source]
        versions = [piece._version for piece in pieces]
        kernel(name).overwrite_if_(torch.tensor(flag), pieces, written if entry == 7.0 else entry)
        assert all(piece._version > old for piece, old in zip(pieces, versions, strict=True))
        for piece, expected in zip(pieces, written if flag else before, strict=True):
            assert torch.equal(piece.nan_to_num(9.0), expected.nan_to_num(9.0))


@pytest.mark.parametrize("name", ["reference", "cuda"])
def test_a_source_in_another_order_is_written_entry_by_entry(name: str) -> None:
    source = torch.arange(12.0).view(3, 4).t()
    piece = torch.zeros(4, 3)
    kernel(name).overwrite_if_(torch.tensor(True), [piece], [source])
    assert torch.equal(piece, source)


@pytest.mark.parametrize("name", KERNELS)
def test_a_sparse_vector_is_spread_into_one_piece_that_is_not_like_it(name: str) -> None:
    indices = torch.tensor([[0, 7, 69_999]])
    vector = torch.zeros(70_000).index_fill_(0, indices[0], 1.5)
    support = Support(indices, torch.tensor([3]))
    for piece in (torch.ones(70_000, dtype=torch.bfloat16), torch.ones(700, 100).t()):
        kernel(name).spread_([piece], vector, support)
        assert torch.equal(piece.float().reshape(-1), vector)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [("take_largest_", (5,)), ("take_largest_", (2, None, 100)), ("take_above_", (1.0, 100))],
)
def test_torch_knows_that_a_kernel_has_written(function: str, arguments: tuple[Any, ...]) -> None:
    """An aggregate that was changed must not pass for one that is zero outside of its support."""
    residual, grad = torch.zeros(70_000), torch.randn(70_000)
    before = residual._version
    getattr(kernel_named("cpu"), function)(residual, grad, *arguments)
    assert residual._version > before
