"""Sums that do not depend on the order of addition, and rounding at random for residuals in bfloat16."""

from fractions import Fraction

import pytest
import torch

from regtopk.core.exact import exact_sum
from regtopk.core.precision import round_at_random


def test_sums_are_those_of_rationals() -> None:
    """Within the rounding of 1000 entries to 2^-52 of the power of two above the largest, 2^7."""
    x = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1.5, 1000)
    for row, total in zip(x, exact_sum(x), strict=True):
        true = sum(map(Fraction, row.tolist()), Fraction(0))
        assert abs(Fraction(float(total)) - true) <= 500 * Fraction(2) ** (7 - 52)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_neither_order_nor_batch_matter(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(3, 100_000, generator=generator) * torch.logspace(-20, 20, 100_000)).to(dtype)
    total = exact_sum(x)
    assert total.dtype == torch.float64
    assert torch.equal(exact_sum(x[:, torch.randperm(100_000, generator=generator)]), total)
    assert torch.equal(torch.stack([exact_sum(row) for row in x]), total)


@pytest.mark.parametrize("size", [1e-250, 1e-40, 1.0, 1e38, 1e300])
def test_any_size_and_zeros(size: float) -> None:
    x = torch.tensor([3.0, 0.0, -1.0], dtype=torch.float64) * size
    assert float(exact_sum(x)) == pytest.approx(2 * size, rel=1e-12)
    assert exact_sum(torch.zeros(2, 5)).tolist() == [0.0, 0.0]


def test_a_number_becomes_one_of_its_neighbours_and_itself_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(2000, generator=generator) * torch.logspace(-6, 6, 2000)
    rounded = torch.stack([round_at_random(vector, torch.tensor(1), step) for step in range(2000)]).double()
    assert ((rounded - vector).abs() <= 2.0**-7 * vector.abs()).all()
    standard_error = 2.0**-8 * vector.abs() / 2000**0.5  # at most: half the distance of the neighbours
    off = (rounded.mean(0) - vector) / standard_error
    assert off.abs().max() < 5 and abs(off.mean()) < 4 / 2000**0.5


def test_what_bfloat16_holds_stays_as_it_is() -> None:
    vector = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-126, 3.0e38]).bfloat16().float()
    assert torch.equal(round_at_random(vector, torch.tensor(0), 3).float(), vector)


def test_workers_draw_apart_and_the_same_batched_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = torch.full((3, 10_001), 1 + 2.0**-9)
    batched = round_at_random(vector, torch.arange(3).unsqueeze(-1), 7)
    alone = [round_at_random(row, torch.tensor(n), 7) for n, row in enumerate(vector)]
    assert torch.equal(batched, torch.stack(alone)) and not torch.equal(alone[0], alone[1])
    monkeypatch.setattr("regtopk.core.precision._PIECE", 1 << 10)
    assert torch.equal(round_at_random(vector[1], torch.tensor(1), 7), alone[1])  # piece by piece
