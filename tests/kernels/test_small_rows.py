"""Numpy's way with short rows gives the reference's bits, ties and NaN included."""

from functools import partial

import pytest
import torch

from regtopk.kernels import dispatch
from regtopk.kernels.cpu import small_rows
from regtopk.kernels.reference import selection as reference
from tests.kernels.checks import ADVERSARIAL, check_take_largest_, choose_damped

DTYPES = [torch.float32, torch.float64]
GRAD_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


check = partial(check_take_largest_, small_rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (1,), (20,), (3, 4)])
@pytest.mark.parametrize("numel", [1, 2, 63, 100, 1001])
def test_rows_and_batches(batch: tuple[int, ...], numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(numel)
    for k in {1, max(1, numel // 64), max(1, numel // 2), numel}:
        damped, damping = choose_damped(numel, k, batch)
        residual, grad = torch.randn(*batch, numel, dtype=dtype), torch.randn(*batch, numel, dtype=dtype)
        check(residual, grad, k, damped, damping.to(dtype))
        check(residual, grad, k)


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("density", [0.01, 0.1, 0.6])
def test_inputs_chosen_to_hurt(name: str, density: float) -> None:
    numel = 500
    torch.manual_seed(0)
    grad = torch.stack([ADVERSARIAL[name](numel, "cpu"), torch.randn(numel)])  # with ties, and without
    check(torch.zeros(2, numel), grad, round(density * numel))


@pytest.mark.parametrize("dtype", GRAD_DTYPES)
def test_gradients_of_every_dtype_in_any_layout(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    grad = torch.randn(3, 20, 4, 100).to(dtype)[:, :, 1]
    check(torch.randn(3, 20, 100), grad, 40)
    check(torch.randn(3, 20, 100), grad[:1].expand(3, 20, 100), 40)


def test_a_nan_score_comes_first_as_in_torch() -> None:
    residual = torch.randn(2, 50)
    residual[1, 7] = torch.inf
    damped, damping = torch.tensor([[3], [7]]), torch.zeros(2, 1)  # inf · 0
    check(residual, torch.randn(2, 50), 5, damped, damping)
    assert residual[1, 7] == 0


def test_short_rows_on_the_cpu_go_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    short = torch.zeros(3, 100)
    assert dispatch.kernel_for(short, short.half()) is small_rows
    for other in (torch.zeros(100, 3).T, short.bfloat16(), short.to("meta")):
        assert dispatch.kernel_for(other, short) is reference
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.kernel_for(short, short) is reference
