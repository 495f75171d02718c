"""The kernels under test. Without a GPU, Triton's run in its interpreter, on CPU tensors."""

import os
from importlib import import_module
from types import ModuleType

import pytest
import torch

from regtopk.kernels import cpu, cpu_rows

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


@pytest.fixture(params=["cpu", "triton"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(cpu_rows, "_SMALL_STRETCH", 1 << 12)  # small vectors too go to several threads
    return import_module(f"regtopk.kernels.{request.param}")


@pytest.fixture
def numel(kernel: ModuleType) -> int:
    """Entries enough for several threads, or for several programs where an interpreter runs them."""
    return 20_011 if kernel is cpu else 5_003
