"""Chunked Top-k: the fast kernels against the reference, and the reference by hand."""

import pytest
import torch

from regtopk.kernels import Damped, Kernel
from regtopk.kernels.reference import selection as reference
from tests.kernels.checks import check_take_per_chunk_, choose_damped


def test_the_reference_by_hand() -> None:
    residual = torch.tensor([3.0, 1.0, -2.0, 0.0, 5.0, -6.0, 7.0])
    indices, values = reference.take_largest_per_chunk_(
        residual, torch.zeros(7), 3, 2, Damped(torch.tensor([0]), torch.tensor([0.3]))
    )
    assert indices.tolist() == [1, 2, 4, 5, 6] and values.tolist() == [1.0, -2.0, 5.0, -6.0, 7.0]
    assert residual.tolist() == [3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("chunk", "k"), [(1, 1), (64, 3), (1000, 1000), (4096, 5), (5000, 40), (20_000, 7)])
def test_chunks(kernel: Kernel, numel: int, chunk: int, k: int) -> None:
    torch.manual_seed(chunk)
    numel = min(numel, 4 * chunk + chunk // 2)
    damped, damping = choose_damped(numel, max(1, numel // 50))
    check_take_per_chunk_(kernel, torch.randn(numel), torch.randn(numel), chunk, k)
    check_take_per_chunk_(kernel, torch.randn(numel), torch.randn(numel), chunk, k, damped, damping)


@pytest.mark.parametrize("value", [0.0, 1.5, 1e-45])
def test_equal_entries(kernel: Kernel, numel: int, value: float) -> None:
    check_take_per_chunk_(kernel, torch.zeros(numel), torch.full((numel,), value), 4096, 5)


def test_batches_and_dtypes(kernel: Kernel, numel: int) -> None:
    torch.manual_seed(0)
    damped, damping = choose_damped(numel, 90, (2, 2))
    residual = torch.randn(2, 2, numel, dtype=torch.float64)
    grad = torch.randn(2, 2, numel).bfloat16()
    check_take_per_chunk_(kernel, residual, grad, 3000, 11, damped, damping.double())
    check_take_per_chunk_(kernel, residual.float(), grad.half(), 3000, 11)
