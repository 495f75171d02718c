"""Sums that do not depend on the order of addition."""

from fractions import Fraction

import pytest
import torch

from regtopk.core.exact import exact_sum


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
