"""The kernels under test. Without a GPU, Triton's run in its interpreter, on CPU tensors."""

import os
from types import ModuleType

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined


@pytest.fixture(params=["cpu"])
def kernel(request: pytest.FixtureRequest) -> ModuleType:
    from regtopk.kernels import cpu

    return cpu
