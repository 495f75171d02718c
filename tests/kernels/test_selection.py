"""Every fast selection against the reference: sizes, dtypes, layouts, inputs chosen to hurt; and by hand."""

import math

import pytest
import torch
from torch import Tensor

from regtopk.kernels import Damped
from regtopk.kernels.cpu import rows as cpu_rows
from regtopk.kernels.dispatch import Kernel, kernel_named
from regtopk.kernels.reference import selection as reference
from tests.kernels import checks
from tests.kernels.checks import ADVERSARIAL, candidates_suffice, check_take_largest_, choose_damped

EDGES = [1, 2, 3, 17, 63, 64, 65, 1000, 4095, 4096, 4097, 8193]
LARGE = [65535, 65536, 65537, 2**17 + 1, 999_983]
cpu = kernel_named("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("numel", [*EDGES, 2**16])
def test_sizes(kernel: Kernel, numel: int) -> None:
    check_several_k(kernel, numel, {1, max(1, numel // 1000), numel} if numel < 2**16 else {65})


@pytest.mark.parametrize("numel", [*LARGE, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_large_sizes(numel: int) -> None:
    check_several_k(cpu, numel, {1, numel // 1000, numel // 10} if numel < 10_000_000 else {10_000})


def check_several_k(kernel: Kernel, numel: int, several_k: set[int]) -> None:
    torch.manual_seed(numel)
    for k in sorted(several_k):
        damped, damping = choose_damped(numel, k)
        check_take_largest_(kernel, torch.randn(numel), torch.randn(numel), k, damped, damping)


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("density", [1e-3, 0.5])  # from candidates, and from all entries
def test_inputs_chosen_to_hurt(kernel: Kernel, numel: int, name: str, density: float) -> None:
    k = max(1, round(density * numel))
    torch.manual_seed(0)
    damped, damping = choose_damped(numel, k)
    grad = ADVERSARIAL[name](numel, "cpu")
    if kernel is cpu or k > 0.1 * numel:  # the interpreter is slow: one of them for each way of the programs
        check_take_largest_(kernel, torch.zeros(numel), grad, k)
    if kernel is cpu or k < 0.1 * numel:
        check_take_largest_(kernel, grad * 0.5, grad, k, damped, damping)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # from Triton's interpreter
def test_an_overflowing_sum_is_taken_first(kernel: Kernel, numel: int) -> None:
    residual, grad = torch.rand(numel), torch.rand(numel)
    residual[777] = grad[777] = 3e38
    indices, values = check_take_largest_(kernel, residual, grad, 1)
    assert indices.tolist() == [777] and values.tolist() == [float("inf")]


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0, 1.5, None])
@pytest.mark.parametrize("k", [40, 100])
def test_damped_entries_at_the_boundary(
    kernel: Kernel, numel: int, words: list[Tensor], k: int, factor: float | None
) -> None:
    """Damping moves entries onto, over and below the k-th score, exactly."""
    torch.manual_seed(1)
    grad = torch.randn(numel)
    order = grad.abs().argsort(descending=True)
    for first in (0, k - 3):
        damped = order[first : first + 60].sort().values
        exact = grad[order[k - 1]].abs() / grad[damped].abs()  # scores within an ulp of the k-th
        damping = exact if factor is None else torch.full((60,), factor)
        check_take_largest_(kernel, torch.zeros(numel), grad, k, damped, damping)
    assert all(candidates_suffice(of_call, numel, k) == [k == 40] for of_call in words)
    assert len(words) == (0 if kernel is cpu else 2)


@pytest.mark.parametrize("density", [1e-3, 0.1, 0.5])
def test_more_entries_damped_than_taken(kernel: Kernel, numel: int, density: float) -> None:
    torch.manual_seed(2)
    damped, damping = torch.randperm(numel)[: numel // 2].sort().values, torch.rand(numel // 2) * 3
    grad = torch.randn(numel)
    check_take_largest_(kernel, torch.randn(numel), grad, round(density * numel), damped, damping)
    check_take_largest_(kernel, torch.randn(numel), grad, 10, damped[::2], damping[::2])
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
    check_take_largest_(kernel, torch.randn(numel), grad, 10, *nothing)


@pytest.mark.parametrize(
    ("residual_dtype", "grad_dtype"),
    [
        *((torch.float32, grad_dtype) for grad_dtype in DTYPES),
        *((torch.float64, grad_dtype) for grad_dtype in (torch.float64, torch.bfloat16)),
    ],
)
def test_dtypes(
    kernel: Kernel, numel: int, words: list[Tensor], residual_dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    k = 33
    torch.manual_seed(3)
    damped, damping = choose_damped(numel, k)
    damping = damping.to(residual_dtype)
    for scale in (1.0, 1e-6) if grad_dtype == torch.float16 else (1.0,):  # the second is denormal there
        residual = torch.randn(numel, dtype=residual_dtype) * scale
        grad = (torch.randn(numel, dtype=torch.float64) * scale).to(grad_dtype)
        check_take_largest_(kernel, residual, grad, k, damped, damping)
    assert all(candidates_suffice(of_call, numel, k) == [True] for of_call in words)
    words.clear()
    check_take_largest_(kernel, residual * 0, grad, numel // 2)
    assert all(candidates_suffice(of_call, numel, numel // 2) == [False] for of_call in words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_candidates_on_a_cpu_take_a_sixteenth_of_a_byte_an_entry(dtype: torch.dtype) -> None:
    numel = 1 << 22
    residual = torch.ones(numel, dtype=dtype)
    (row,) = cpu_rows.rows_of(residual, residual, None)
    for density in (1e-3, 0.004, 0.01):
        _, capacity = cpu.guess(row, round(density * numel))
        assert capacity * residual.itemsize <= numel / 16
        assert (capacity > 0) == (density <= 0.04 / residual.itemsize)  # as docs/kernels.md says


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_finite_half_is_read_exactly(kernel: Kernel, dtype: torch.dtype) -> None:
    grad = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    grad = grad[torch.isfinite(grad)]
    if kernel is not cpu and not torch.cuda.is_available():  # the interpreter flushes denormals
        grad = grad[grad.abs() >= torch.finfo(torch.float32).tiny]
    check_take_largest_(kernel, torch.zeros(len(grad)), grad, 1)


@pytest.mark.parametrize("batch", [(1,), (5,), (2, 3)])
def test_batches(kernel: Kernel, numel: int, words: list[Tensor], batch: tuple[int, ...]) -> None:
    k = 50
    torch.manual_seed(4)
    damped, damping = choose_damped(numel, k, batch)
    residual, grad = torch.randn(*batch, numel), torch.randn(*batch, numel)
    grad.view(-1, numel)[0] = 0.25  # rows of different kinds in one call
    residual.view(-1, numel)[0] = 0.0
    check_take_largest_(kernel, residual, grad, k, damped, damping)
    for of_call in words:
        assert candidates_suffice(of_call, numel, k) == [row > 0 for row in range(math.prod(batch))]


def test_rows_of_a_wider_matrix(kernel: Kernel, numel: int) -> None:
    torch.manual_seed(5)
    wide, wide_grad = torch.randn(3, numel + 4000), torch.randn(3, numel + 9999)
    around = wide[:, numel:].clone()
    check_take_largest_(kernel, wide[:, :numel], wide_grad[:, 7 : numel + 7], 40)
    assert torch.equal(wide[:, numel:], around)


def test_thresholds_by_hand() -> None:
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
    checks.check_take_above_(kernel, torch.randn(numel), torch.randn(numel), threshold, capacity)


def test_a_threshold_a_row_and_nothing_to_add(kernel: Kernel, numel: int) -> None:
    torch.manual_seed(1)
    residual, threshold = torch.randn(2, 3, numel), torch.rand(2, 3) * 4
    checks.check_take_above_(kernel, residual.clone(), None, threshold, 200)
    checks.check_take_above_(kernel, residual, torch.randn(2, 3, numel).bfloat16(), threshold, numel)


def test_entries_equal_to_the_threshold_are_taken(kernel: Kernel, numel: int) -> None:
    residual = torch.full((numel,), -0.1, dtype=torch.float64)
    checks.check_take_above_(kernel, residual, torch.zeros(numel), 0.1, 50)


def test_a_threshold_in_rows_of_every_size(kernel: Kernel) -> None:
    for numel in (1, 63, 64, 65, 4095, 4096, 4097):
        checks.check_take_above_(kernel, torch.randn(numel), torch.randn(numel), 1.0, max(1, numel // 2))


def test_chunks_by_hand() -> None:
    residual = torch.tensor([3.0, 1.0, -2.0, 0.0, 5.0, -6.0, 7.0])
    damped = Damped(torch.tensor([0]), torch.tensor([0.3]))
    indices, values = reference.take_largest_(residual, torch.zeros(7), 2, damped, chunk=3)
    assert indices.tolist() == [1, 2, 4, 5, 6] and values.tolist() == [1.0, -2.0, 5.0, -6.0, 7.0]
    assert residual.tolist() == [3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("chunk", "k"), [(1, 1), (64, 3), (1000, 1000), (4096, 5), (5000, 40), (20_000, 7)])
def test_chunks(kernel: Kernel, numel: int, chunk: int, k: int) -> None:
    torch.manual_seed(chunk)
    numel = min(numel, 4 * chunk + chunk // 2)
    damped, damping = choose_damped(numel, max(1, numel // 50))
    check_take_largest_(kernel, torch.randn(numel), torch.randn(numel), k, chunk=chunk)
    check_take_largest_(kernel, torch.randn(numel), torch.randn(numel), k, damped, damping, chunk)


@pytest.mark.parametrize("value", [0.0, 1.5, 1e-45])
def test_chunks_of_equal_entries(kernel: Kernel, numel: int, value: float) -> None:
    check_take_largest_(kernel, torch.zeros(numel), torch.full((numel,), value), 5, chunk=4096)


def test_chunks_in_batches_of_other_dtypes(kernel: Kernel, numel: int) -> None:
    torch.manual_seed(0)
    damped, damping = choose_damped(numel, 90, (2, 2))
    residual = torch.randn(2, 2, numel, dtype=torch.float64)
    grad = torch.randn(2, 2, numel).bfloat16()
    check_take_largest_(kernel, residual, grad, 11, damped, damping.double(), 3000)
    check_take_largest_(kernel, residual.float(), grad.half(), 11, chunk=3000)
