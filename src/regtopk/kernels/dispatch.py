"""Which kernel runs: by device, dtype and memory layout; the reference wherever no other can."""

import logging
import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from regtopk.errors import ArgumentError
from regtopk.kernels import reference, small_rows

VARIABLE = "REGTOPK_KERNELS"
SMALL_NUMEL = {"cpu": 1 << 16, "cuda": 1 << 22}  # below, numpy or torch is as fast (benchmarks/kernels.py)

MAX_ROWS = {"cuda": (1 << 16) - 1}  # a row is a program's second number, and CUDA's (gridDim.y) end there

_MODULES = {"cpu": ("cpu", "numba"), "cuda": ("triton", "triton")}  # module here, and what it needs
_RESIDUAL_DTYPES = (torch.float32, torch.float64)
_GRAD_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_log = logging.getLogger("regtopk")


@dataclass(frozen=True)
class Choice:
    """A kernel ("reference", "cpu" or "triton") and why it is the one."""

    kernel: str
    reason: str


def describe(device: torch.device | str, dtype: torch.dtype = torch.float32) -> Choice:
    """Which kernel large vectors on a device use, given the residual's dtype, and why."""
    if _wanted() == "reference":
        return Choice("reference", f"{VARIABLE}=reference")
    if dtype not in _RESIDUAL_DTYPES:
        return Choice("reference", f"no fast kernel for residuals of {dtype}")
    return _describe_type(torch.device(device).type)


def kernel_for(residual: Tensor | None, grad: Tensor | None) -> ModuleType:
    """The module that works on these tensors (one of them may be missing)."""
    either = grad if residual is None else residual
    assert either is not None
    device = either.device.type
    if _wanted() == "reference":
        return reference
    size = either.numel() if device == "cuda" else either.shape[-1]  # a launch serves all rows
    if size < SMALL_NUMEL.get(device, 0):
        return _kernel_for_short(either)
    if device in MAX_ROWS and either.numel() > MAX_ROWS[device] * either.shape[-1]:
        return reference
    if residual is not None and not _is_rows(residual, _RESIDUAL_DTYPES):
        return reference
    if grad is not None and not _is_rows(grad, _GRAD_DTYPES):
        return reference
    choice = _describe_type(device)
    if choice.kernel == "reference":
        _notice(choice.reason)
        return reference
    return import_module(f"regtopk.kernels.{choice.kernel}")


def kernel_for_sums(rows: Tensor) -> ModuleType:
    """The module that adds rows."""
    is_short = rows.device.type == "cpu" and rows.shape[-1] < SMALL_NUMEL["cpu"]
    return small_rows if is_short and _wanted() != "reference" else reference


def _kernel_for_short(residual: Tensor) -> ModuleType:
    """Numpy on the CPU, if the rows are one piece of memory."""
    is_plain = residual.is_contiguous() and residual.dtype in _RESIDUAL_DTYPES
    return small_rows if is_plain and residual.device.type == "cpu" else reference


def _wanted() -> str:
    wanted = os.environ[VARIABLE] if VARIABLE in os.environ else "auto"  # noqa: SIM401 (get takes thrice as long)
    if wanted not in ("", "auto", "reference"):
        raise ArgumentError(f"{VARIABLE} must be 'auto' or 'reference', got {wanted!r}")
    return wanted


def _is_rows(tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether every row is one piece of memory, at equal distances, of one of the dtypes."""
    shape, strides = tensor.shape, tensor.stride()
    is_regular = strides[-1] == 1 and all(
        strides[i] == shape[i + 1] * strides[i + 1] for i in range(tensor.dim() - 2)
    )
    return (is_regular or tensor.is_contiguous()) and tensor.dtype in dtypes


@cache
def _describe_type(device: str) -> Choice:
    if device not in _MODULES:
        return Choice("reference", f"no fast kernel for device type {device!r}")
    kernel, needs = _MODULES[device]
    try:
        import_module(f"regtopk.kernels.{kernel}")
    except ImportError as error:
        extra = "regtopk[kernels]" if needs == "numba" else needs
        return Choice("reference", f"{needs} is missing ({error}); try: pip install '{extra}'")
    except Exception as error:  # a package that does not fit the others may raise anything
        return Choice("reference", f"{needs} cannot be imported ({type(error).__name__}: {error})")
    return Choice(kernel, f"{device} tensors, {needs} {import_module(needs).__version__}")


@cache
def _notice(reason: str) -> None:
    """Say once why the slow path is taken. A log line, not a warning: the results are the same."""
    _log.warning("regtopk selects with plain torch operations, which is slower: %s", reason)
