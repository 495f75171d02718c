"""The aggregate, recovered from the parameters that a server sends back."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from regtopk.core import aggregate_from_parameters
from tests.refusals import refusal

LR = 0.05


def test_the_sign_is_that_of_a_descent() -> None:
    before, after = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0])  # w - 0.5 (1, -2)
    assert aggregate_from_parameters(before, after, 0.5).tolist() == [1.0, -2.0]


def test_lists_of_parameters_come_back_flat_and_in_order() -> None:
    model = nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.25).step()
    aggregate = aggregate_from_parameters(before, model.parameters(), 0.25)
    assert not aggregate.requires_grad
    torch.testing.assert_close(aggregate, torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lr", [1e-3, 0.1])
def test_the_error_is_that_of_the_rounded_parameters(dtype: torch.dtype, lr: float) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(100_000, generator=generator, dtype=dtype)
    grad = torch.randn(100_000, generator=generator, dtype=dtype)
    grad *= torch.logspace(-9, 1, 100_000, dtype=dtype)
    parameter = nn.Parameter(before.clone())
    parameter.grad = grad.clone()
    torch.optim.SGD([parameter], lr=lr).step()
    found = aggregate_from_parameters(before, parameter, lr)
    eps, error = torch.finfo(dtype).eps, (found - grad).abs()
    assert bool((error <= eps * (parameter.detach().abs() / (2 * lr) + 2 * grad.abs())).all())
    assert float(error.max()) > eps / (8 * lr)  # and no smaller than its order: weights are about 1
    is_unmoved = parameter.detach() == before
    assert bool((found[is_unmoved] == 0).all())
    assert bool(is_unmoved.any()) == (dtype == torch.float32)  # 1e-9 lr is below float32's steps


W = torch.ones(2)
PLACE = "the shape, dtype and device of before"
SAME = "before and after must hold the same parameters, at least one"


@pytest.mark.parametrize("lr", [0.0, -0.1, math.inf, math.nan, "0.1"])
def test_a_learning_rate_must_be_positive(lr: Any) -> None:
    text = f"lr must be positive and finite, got {lr!r}"
    assert refusal(lambda: aggregate_from_parameters(W, W.clone(), lr)) == ("ArgumentError", text)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (W, torch.ones(3), f"after must have {PLACE}, (2,) torch.float32 cpu, got (3,) torch.float32 cpu"),
        ([W], [W.double()], f"after must have {PLACE}, (2,) torch.float32 cpu, got (2,) torch.float64 cpu"),
        (W.long(), W.long(), "before must hold floating point tensors, got torch.int64"),
        (W, W, "before must be a copy made before the step, got the same memory as after"),
        ([], [], f"{SAME}, got 0 before and 0 after"),
        ([W, W], [W], f"{SAME}, got 2 before and 1 after"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(before: Any, after: Any, message: str) -> None:
    assert refusal(lambda: aggregate_from_parameters(before, after, 0.1)) == ("ArgumentError", message)
