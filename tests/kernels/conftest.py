"""The kernels under test. Without a GPU, Triton's run in its interpreter, on CPU tensors."""

import inspect
import os
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk.kernels.cpu import rows as cpu_rows
from regtopk.kernels.dispatch import Kernel, kernel_named


def make_interpreter_faster() -> None:
    """Triton's interpreter does the same work at every call; here it does so once.

    It searches its whole language for builtins, puts its own in their places though they are there already,
    and makes its table of types.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    language: Any = import_module("triton.language")
    is_builtin, patch_lang = language.core.is_builtin, interpreter._patch_lang

    @cache
    def names_of_builtins(pkg: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(pkg) if is_builtin(member)]

    def patch_builtin(pkg: Any, *arguments: Any) -> None:
        for name in names_of_builtins(pkg):
            member = getattr(pkg, name)
            if is_builtin(member):  # not yet patched
                interpreter._patch_attr(pkg, name, member, *arguments)

    def patch_lang_once(program: Any) -> Any:
        own = program.__globals__.get("tl", language.core)  # the second in Triton's own functions
        return patch_lang(program) if is_builtin(own.load) else None  # when one program calls another

    numpy_type, numpy_type_of_scalar = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)

    def numpy_type_once(of: Any) -> Any:
        is_number = type(of.scalar) is language.dtype  # others cannot be hashed
        return numpy_type_of_scalar(of.scalar) if is_number else numpy_type(of)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang_once
    interpreter._get_np_dtype = numpy_type_once


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    make_interpreter_faster()


@pytest.fixture(params=["cpu", "cuda"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(cpu_rows, "_SMALL_STRETCH", 1 << 12)  # small vectors too go to several threads
    return kernel_named(request.param)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The words of calls on CUDA, (rows, words) each: see `cuda.programs.words`."""
    cuda = import_module("regtopk.kernels.cuda.selection")
    make_rows, found = cuda.DeviceRows, []

    def keep_words(*arguments: Any) -> Any:
        rows = make_rows(*arguments)
        found.append(rows.arguments["work"])
        return rows

    monkeypatch.setattr(cuda, "DeviceRows", keep_words)
    return found


@pytest.fixture
def numel(kernel: Kernel) -> int:
    """Entries enough for several threads, or for several programs where an interpreter runs them."""
    return 20_011 if kernel is kernel_named("cpu") else 5_003
