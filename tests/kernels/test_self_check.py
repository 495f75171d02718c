"""The self-check must pass here, and must notice a kernel that is wrong."""

import json

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from regtopk import kernels
from regtopk.cli import app
from regtopk.core.options import counted
from regtopk.kernels import Damped
from regtopk.kernels.dispatch import kernel_named


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
