"""The kernels under test. Without a GPU, Triton's run in its interpreter, on CPU tensors."""

import os
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk.kernels import cpu, cpu_rows

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


@pytest.fixture(params=["cpu", "triton"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(cpu_rows, "_SMALL_STRETCH", 1 << 12)  # small vectors too go to several threads
    return import_module(f"regtopk.kernels.{request.param}")


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The words of Triton's calls, (rows, words) each, which say what was found (see `triton_words`)."""
    triton = import_module("regtopk.kernels.triton")
    rows_of, found = triton.rows_of, []

    def keep_words(*arguments: Any, **options: Any) -> Any:
        rows = rows_of(*arguments, **options)
        found.append(rows.work)
        return rows

    monkeypatch.setattr(triton, "rows_of", keep_words)
    return found


@pytest.fixture
def numel(kernel: ModuleType) -> int:
    """Entries enough for several threads, or for several programs where an interpreter runs them."""
    return 20_011 if kernel is cpu else 5_003
