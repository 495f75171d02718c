"""Which kernel runs, what it says about itself, that the self-check notices a wrong one; and threads."""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from typer.testing import CliRunner

from regtopk import kernels
from regtopk.cli import app
from regtopk.core.options import counted
from regtopk.errors import ArgumentError
from regtopk.kernels import Damped, dispatch
from regtopk.kernels.cpu import small_rows
from regtopk.kernels.cpu.threads import side_by_side
from regtopk.kernels.dispatch import kernel_named
from regtopk.kernels.reference import selection as reference

LARGE, SHORT = 1 << 16, torch.zeros(3, 100)
cpu, cuda = map(dispatch.kernel_named, ("cpu", "cuda"))


@pytest.fixture(autouse=True)
def default_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)


def test_large_vectors_on_the_cpu_use_the_compiled_loops() -> None:
    residual = torch.zeros(LARGE)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert dispatch.kernel_for(residual, torch.zeros(LARGE, dtype=dtype)) is cpu


def test_short_rows_on_the_cpu_go_to_numpy() -> None:
    assert dispatch.kernel_for(SHORT, SHORT.half()) is small_rows


CANNOT = {
    "small, other residual": (SHORT.bfloat16(), SHORT),
    "small, without memory": (SHORT.to("meta"), SHORT),
    "small, not in one piece": (torch.zeros(100, 2).T, torch.zeros(2, 100)),
    "rows not in one piece": (torch.zeros(LARGE, 2).T, torch.zeros(2, LARGE)),
    "expanded": (torch.zeros(LARGE), torch.zeros(1).expand(LARGE)),
    "strided": (torch.zeros(LARGE), torch.zeros(2 * LARGE)[::2]),
    "other gradient": (torch.zeros(LARGE), torch.zeros(LARGE, dtype=torch.float8_e5m2)),
    "other residual": (torch.zeros(LARGE, dtype=torch.float16), torch.zeros(LARGE)),
}


@pytest.mark.parametrize("name", CANNOT)
def test_what_the_fast_kernels_cannot_do_goes_to_the_reference(name: str) -> None:
    assert dispatch.kernel_for(*CANNOT[name]) is reference


def test_the_environment_forces_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.kernel_for(torch.zeros(LARGE), None) is reference
    assert dispatch.kernel_for(SHORT, SHORT) is reference
    assert kernels.describe("cpu") == ("reference", "REGTOPK_KERNELS=reference")
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(ArgumentError, match="must be 'auto' or 'reference', got 'fast'"):
        kernels.describe("cpu")


@pytest.mark.parametrize(("device", "package"), [("cpu", "numba"), ("cuda", "triton")])
def test_a_choice_names_its_package(device: str, package: str) -> None:
    choice = kernels.describe(device)
    assert choice.kernel == device and f"{device} tensors, {package}" in choice.reason


def test_more_rows_than_a_gpu_numbers_go_to_the_reference() -> None:
    with FakeTensorMode():  # tensors without memory, so also without a GPU
        few, many = torch.empty(65_535, 65, device="cuda"), torch.empty(65_536, 65, device="cuda")
        assert dispatch.kernel_for(few, few) is cuda
        assert dispatch.kernel_for(few.view(-1, 5, 65), None) is cuda
        for residual, grad in ((many, many), (many.view(2, -1, 65), None)):
            assert dispatch.kernel_for(residual, grad) is reference


def test_a_device_without_a_kernel_uses_the_reference() -> None:
    assert kernels.describe("meta") == ("reference", "no fast kernel for device type 'meta'")


@pytest.fixture
def numba_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder that numba is imported from: missing, unless a test writes a `numba.py` there."""
    for cached in (dispatch._describe_type, dispatch._notice, dispatch.kernel_named):
        cached.cache_clear()
    for name in ("selection", "loops", "compiled"):
        monkeypatch.delitem(sys.modules, f"regtopk.kernels.cpu.{name}")
    monkeypatch.delitem(sys.modules, "numba")
    monkeypatch.delattr("regtopk.kernels.cpu.selection")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    yield tmp_path
    dispatch._describe_type.cache_clear()


@pytest.mark.parametrize(("rank", "level"), [(None, "WARNING"), ("0", "WARNING"), ("3", "DEBUG")])
def test_without_numba_one_line_of_rank_0_says_so_and_the_reference_runs(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    numba_cannot_be_imported: Path,
    rank: str | None,
    level: str,
) -> None:
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    with caplog.at_level(logging.DEBUG, logger="regtopk"):
        for _ in range(3):
            assert dispatch.kernel_for(torch.zeros(LARGE), torch.zeros(LARGE)) is reference
    (record,) = caplog.records
    assert record.levelname == level
    assert "numba is missing" in record.getMessage()
    assert "pip install 'regtopk[kernels]'" in record.getMessage()


def test_a_broken_numba_is_said_and_the_reference_runs(numba_cannot_be_imported: Path) -> None:
    (numba_cannot_be_imported / "numba.py").write_text("raise RuntimeError('numpy is too new')")
    choice = kernels.describe("cpu")
    assert choice.kernel == "reference"
    assert choice.reason == "numba cannot be imported (RuntimeError: numpy is too new)"


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    torch.manual_seed(1)
    residual, grad = torch.randn(3, 1 << 17), torch.randint(-5, 6, (3, 1 << 17)).float()
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            own = residual.clone()
            results.append((*cpu.take_largest_(own, grad, 1000), own))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, result, results[0])) for result in results[1:])


def test_calls_from_several_threads_at_once() -> None:
    torch.manual_seed(2)
    inputs = [(torch.randn(1 << 17), torch.randn(1 << 17)) for _ in range(4)]
    expected = [reference.take_largest_(r.clone(), g, 100) for r, g in inputs]
    results: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def call(n: int) -> None:
        for _ in range(5):
            results[n] = cpu.take_largest_(inputs[n][0].clone(), inputs[n][1], 100)

    callers = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(torch.equal(results[n][0], expected[n][0]) for n in range(4))


def test_agrees_here() -> None:
    check = kernels.self_check("cpu", seconds=0.2)
    assert check.num_cases >= 4 and check.failure is None


def test_notices_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = kernel_named("cpu")
    take_largest_ = cpu.take_largest_

    def one_entry_too_far(residual: Tensor, grad: Tensor, k: int, damped: Damped) -> tuple[Tensor, Tensor]:
        before = residual.clone()
        indices, values = take_largest_(residual, grad, k, damped)
        lost = indices[:, :1]
        residual.scatter_(-1, lost, (before + grad).gather(-1, lost))
        indices[:, 0] = (residual != 0).int().argmax(-1)
        return indices.sort(-1).values, values

    monkeypatch.setattr(cpu, "take_largest_", one_entry_too_far)
    failure = kernels.self_check("cpu", seconds=0.2).failure
    assert failure is not None and "J = " in failure and "torch.float32" in failure
    answer = CliRunner().invoke(app, ["doctor", "--seconds", "0"])
    assert answer.exit_code == 1 and "DIFFERS from the reference" in answer.stderr


def test_doctor_prints_kernel_reason_threads_and_check() -> None:
    answer = CliRunner().invoke(app, ["doctor", "--seconds", "0"])
    assert answer.exit_code == 0
    assert "cpu (CPU): cpu kernels: cpu tensors, numba" in answer.stdout
    assert f"{counted(torch.get_num_threads(), 'thread')} on " in answer.stdout
    assert "agrees with the reference" in answer.stdout


def test_doctor_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGTOPK_KERNELS", "reference")
    answer = CliRunner().invoke(app, ["doctor", "--seconds", "0", "--json"])
    device = json.loads(answer.stdout)["devices"][0]
    assert device["kernel"] == "reference" and device["reason"] == "REGTOPK_KERNELS=reference"
    assert device["num_cases"] == 4 and device["failure"] is None  # one a dtype


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.usefixtures("three_threads")
def test_results_in_order() -> None:
    assert side_by_side(lambda a, b: a * b, [(n, 2) for n in range(50)]) == [2 * n for n in range(50)]
    assert side_by_side(lambda n: n, []) == []


@pytest.mark.usefixtures("three_threads")
def test_never_more_than_torchs_threads() -> None:
    running, most = set(), []

    def task(n: int) -> None:
        running.add(n)
        most.append(len(running))
        threading.Event().wait(0.002)
        running.remove(n)

    side_by_side(task, [(n,) for n in range(30)])
    assert max(most) <= 3


@pytest.mark.parametrize("num_tasks", [1, 30])
@pytest.mark.usefixtures("three_threads")
def test_an_error_comes_back(num_tasks: int) -> None:
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda n: 1 // n, [(n,) for n in range(num_tasks)])
