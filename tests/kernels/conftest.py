"""The kernels under test. Without a GPU, Triton's run in its interpreter, on CPU tensors."""

import inspect
import os
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk.kernels import Kernel, cpu, cpu_rows
from regtopk.kernels.dispatch import kernel_named


def make_interpreter_faster() -> None:
    """Triton's interpreter searches its whole language for builtins at every call; here it does so once."""
    interpreter = import_module("triton.runtime.interpreter")
    is_builtin = import_module("triton.language").core.is_builtin

    @cache
    def names_of_builtins(pkg: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(pkg) if is_builtin(member)]

    def patch_builtin(pkg: Any, *arguments: Any) -> None:
        for name in names_of_builtins(pkg):
            member = getattr(pkg, name)
            if is_builtin(member):  # not yet patched
                interpreter._patch_attr(pkg, name, member, *arguments)

    vars(interpreter)["_patch_builtin"] = patch_builtin


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    make_interpreter_faster()


@pytest.fixture(params=["cpu", "cuda"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(cpu_rows, "_SMALL_STRETCH", 1 << 12)  # small vectors too go to several threads
    return kernel_named(request.param)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The words of calls on CUDA, (rows, words) each, which say what was found (see `triton_words`)."""
    cuda = import_module("regtopk.kernels.cuda")
    rows_of, found = cuda.rows_of, []

    def keep_words(*arguments: Any) -> Any:
        rows = rows_of(*arguments)
        found.append(rows.work)
        return rows

    monkeypatch.setattr(cuda, "rows_of", keep_words)
    return found


@pytest.fixture
def numel(kernel: Kernel) -> int:
    """Entries enough for several threads, or for several programs where an interpreter runs them."""
    return 20_011 if kernel is cpu else 5_003
