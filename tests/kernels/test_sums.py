"""Sums run from zero in rank order, and numpy's way with short rows is the reference's: bit for bit."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from regtopk import kernels
from regtopk.kernels.cpu import small_rows
from regtopk.kernels.reference.sums import sum_dense_in_rank_order
from tests.kernels.checks import ADVERSARIAL, check_take_largest_, choose_damped


@pytest.fixture(params=[1, 2, 7])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def sparse_rows(*shape: int, numel: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Distinct entries a row, and values of very different size, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(0)
    *batch, m = shape
    # a random start and a stride that has no divisor in common with numel: distinct, and cheap
    start = torch.randint(numel, (*batch, 1), generator=generator)
    indices = ((start + torch.arange(m) * 7919) % numel).sort(-1).values
    size = 10.0 ** torch.randint(-4, 5, (*batch, m), generator=generator)
    return indices, (torch.randn(*batch, m, generator=generator) * size).to(dtype)


# (N, m), J: many workers, long rows, heavy collisions; all far above the 32,768 entries from which torch
# splits work among threads.
LARGE = [((1000, 1000), 100_003), ((4, 200_000), 250_007), ((30_000, 5), 11), ((3, 64, 2000), 2003)]
CASES = [*((*case, torch.float32) for case in (*LARGE, ((50, 20), 61))), ((50, 20), 61, torch.float64)]


@pytest.mark.parametrize(("shape", "numel", "dtype"), CASES)
@pytest.mark.usefixtures("num_threads")
def test_sparse_sums_run_in_rank_order(shape: tuple[int, ...], numel: int, dtype: torch.dtype) -> None:
    indices, values = sparse_rows(*shape, numel=numel, dtype=dtype)
    total = kernels.sum_sparse_in_rank_order(indices, values, numel)
    *_, num_workers, m = shape
    rows = zip(indices.reshape(-1, num_workers, m), values.reshape(-1, num_workers, m), strict=True)
    for (row_indices, row_values), row_total in zip(rows, total.reshape(-1, numel), strict=True):
        expected = np.zeros_like(row_total.numpy())
        for at, value in zip(row_indices.numpy(), row_values.numpy(), strict=True):
            expected[at] += value  # distinct within a worker: a plain addition an entry
        assert total.dtype == dtype and row_total.numpy().tobytes() == expected.tobytes()
    backwards = kernels.sum_sparse_in_rank_order(indices.flip(-2), values.flip(-2), numel)
    assert not torch.equal(total, backwards)  # the order is visible in these numbers


def test_no_workers_entries_and_no_entries() -> None:
    none = torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0)
    assert kernels.sum_sparse_in_rank_order(*none, 4).tolist() == [0.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(20, 1), (300, 1000), (2, 5, 9), (0, 5, 9)])
def test_dense_sums_run_in_rank_order(shape: tuple[int, ...], dtype: torch.dtype, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(shape, generator=generator) * 100).to(dtype)
    rows[..., 0] = -0.0  # sums start from zero: 0 + -0 is 0
    sum_dtype = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(shape[-2], generator=generator, dtype=torch.float64).to(sum_dtype)
    sums = [sum_(rows, weights) for sum_ in (kernels.sum_dense_in_rank_order, sum_dense_in_rank_order)]
    expected = np.zeros((*shape[:-2], shape[-1]), dtype=weights.numpy().dtype)
    for rank, weight in enumerate(weights.numpy()):
        expected = expected + rows[..., rank, :].to(sum_dtype).numpy() * weight
    for total in sums:
        assert total.dtype == sum_dtype and total.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 40, 70_000])
def test_the_first_row_that_is_not_finite_is_found(dtype: torch.dtype, numel: int) -> None:
    largest = torch.finfo(dtype).max
    grads = torch.full((4, numel), -largest, dtype=dtype)
    assert kernels.find_non_finite_row(grads) is None
    assert kernels.find_non_finite_row(torch.zeros(numel, dtype=dtype)) is None
    for value in (torch.nan, torch.inf, -torch.inf):
        for row in (3, 1):
            grads[row, -1] = value
            assert kernels.find_non_finite_row(grads) == row
            assert kernels.find_non_finite_row(grads.reshape(2, 2, numel)) == row
        assert kernels.find_non_finite_row(grads[1]) == 0
        grads[:, -1] = largest


def test_a_sparse_sum_may_be_written_to_given_zeros() -> None:
    indices, values = sparse_rows(4, 300, numel=1009)
    room = torch.zeros(1009)
    total = kernels.sum_sparse_in_rank_order(indices, values, 1009, out=room)
    assert total is room
    assert torch.equal(total, kernels.sum_sparse_in_rank_order(indices, values, 1009))


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
