"""Threshold selections: the fast kernels against the reference, and the reference by hand."""

import pytest
import torch

from regtopk import kernels
from regtopk.kernels import Kernel
from regtopk.kernels.reference import selection as reference
from tests.kernels.checks import check_take_above_


def test_the_reference_by_hand() -> None:
    residual = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.0, 0.0, 1.0, 0.0]])
    grad = torch.tensor([[0.0, -1.0, 0.0, -6.0], [0.0, 0.0, 0.0, -2.0]])
    taken = reference.take_above_(residual, grad, torch.tensor([1.0, 2.0]), capacity=2)
    assert taken.indices.tolist() == [[0, 1], [3, 0]]
    assert taken.values.tolist() == [[1.0, -3.0], [-2.0, 0.0]]
    assert taken.count.tolist() == [2, 1]
    assert taken.num_left.tolist() == [1, 0]
    assert residual.tolist() == [[0.0, 0.0, 0.5, -3.0], [0.0, 0.0, 1.0, 0.0]]


@pytest.mark.parametrize("threshold", [-1.0, 1e-40, 1.0, 2.5, 100.0])
@pytest.mark.parametrize("capacity", [1, 100, 5_000])
def test_one_threshold(kernel: Kernel, numel: int, threshold: float, capacity: int) -> None:
    torch.manual_seed(0)
    check_take_above_(kernel, torch.randn(numel), torch.randn(numel), threshold, capacity)


def test_a_threshold_a_row_and_nothing_to_add(kernel: Kernel, numel: int) -> None:
    torch.manual_seed(1)
    residual, threshold = torch.randn(2, 3, numel), torch.rand(2, 3) * 4
    check_take_above_(kernel, residual.clone(), None, threshold, 200)
    check_take_above_(kernel, residual, torch.randn(2, 3, numel).bfloat16(), threshold, numel)


def test_entries_equal_to_the_threshold_are_taken(kernel: Kernel, numel: int) -> None:
    residual = torch.full((numel,), -0.1, dtype=torch.float64)
    check_take_above_(kernel, residual, torch.zeros(numel), 0.1, 50)


def test_every_size(kernel: Kernel) -> None:
    for numel in (1, 63, 64, 65, 4095, 4096, 4097):
        check_take_above_(kernel, torch.randn(numel), torch.randn(numel), 1.0, max(1, numel // 2))


def test_an_estimated_threshold_is_reached_by_about_k() -> None:
    torch.manual_seed(2)
    residual, grad = torch.randn(3, 200_000), torch.randn(3, 200_000).half()
    threshold = kernels.estimate_threshold(residual, grad, 2000, num_samples=20_000, start=7)
    assert threshold.shape == (3,) and threshold.dtype == residual.dtype
    num = ((residual + grad).abs() >= threshold[:, None]).sum(-1)
    assert bool(((num > 1600) & (num < 2400)).all())  # 200 in the sample, so 7 % is one sigma


def test_an_estimate_from_all_entries_is_exact() -> None:
    residual = torch.randn(1000)
    threshold = kernels.estimate_threshold(residual, None, 10, num_samples=1000, start=3)
    assert threshold == residual.abs().topk(10).values[-1]
