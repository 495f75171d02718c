"""Which kernel runs: by device, dtype and memory layout; the reference wherever no other can."""

import logging
import math
import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from regtopk.errors import ArgumentError
from regtopk.kernels.cpu import small_rows
from regtopk.kernels.cuda.replay import repeat
from regtopk.kernels.reference import selection as reference
from regtopk.kernels.reference import sums
from regtopk.kernels.reference.pieces import Support

VARIABLE = "REGTOPK_KERNELS"
SMALL_NUMEL = {"cpu": 1 << 16, "cuda": 1 << 22}  # below, numpy or torch is as fast (benchmarks/kernels.py)

_FEW_WORDS = 1 << 12  # of messages, or indices; torch's operations take less than a compiled loop's import
MAX_ROWS = (1 << 16) - 1  # on CUDA: a row is a program's second number, and these (gridDim.y) end there

_PACKAGES = {"cpu": "numba", "cuda": "triton"}  # what the kernel of a device needs
_RESIDUAL_DTYPES = (torch.float32, torch.float64)
_GRAD_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_log = logging.getLogger("regtopk")
Kernel = ModuleType  # with the operations of `reference.selection`


class KernelChoice(NamedTuple):
    """The name of a kernel ("reference", "cpu" or "cuda") and why it is chosen."""

    kernel: str
    reason: str


def describe(device: torch.device | str) -> KernelChoice:
    """Which kernel large float32 and float64 vectors on a device use, and why."""
    if _wanted() == "reference":
        return KernelChoice("reference", f"{VARIABLE}=reference")
    return _describe_type(torch.device(device).type)


def kernel_for(residual: Tensor, grad: Tensor | None) -> Kernel:
    """The kernel that works on these tensors."""
    if _is_small(residual):
        is_plain = residual.is_contiguous() and residual.dtype in _RESIDUAL_DTYPES
        has_numpy = is_plain and residual.device.type == "cpu" and _wanted() != "reference"
        return small_rows if has_numpy else reference
    return kernel_named(_name_for(residual, grad))


@cache
def kernel_named(name: str, operations: str = "selection") -> Kernel:
    """Some operations of a kernel, in the same file of each; imported where they are first asked for."""
    return import_module(f"regtopk.kernels.{name}.{operations}")


def join_(vector: Tensor, pieces: Sequence[Tensor], start: Sequence[Tensor] | None = None) -> Tensor:
    """Write pieces, or start minus pieces, into a vector; is it finite? See `reference.pieces.join_`."""
    is_finite: Tensor = kernel_named(_name_for(vector), "pieces").join_(vector, pieces, start)
    return is_finite


def spread_(pieces: Sequence[Tensor], vector: Tensor, support: Support) -> None:
    """Write a vector that is zero outside of its support into pieces: see `reference.pieces.spread_`."""
    kernel_named(_name_for(vector), "pieces").spread_(pieces, vector, support)


def overwrite_if_(flag: Tensor, pieces: Sequence[Tensor], source: Sequence[Tensor] | float) -> None:
    """Write a source over pieces, if a flag on the device says so: see `reference.pieces.overwrite_if_`."""
    is_large = sum(map(Tensor.numel, pieces)) >= SMALL_NUMEL["cuda"]  # one launch for all is worth it
    name = describe("cuda").kernel if is_large and pieces[0].is_cuda else "reference"
    kernel_named(name, "pieces").overwrite_if_(flag, pieces, source)


def index_loops(numbers: Tensor) -> Any:
    """The module whose loops write these indices, or read indices in these words; None: torch does."""
    is_long = numbers.device.type == "cpu" and numbers.numel() >= _FEW_WORDS and numbers.is_contiguous()
    return kernel_named("cpu", "codes") if is_long and describe("cpu").kernel != "reference" else None


def programs_on(device: torch.device, operations: str) -> Any:
    """The module whose programs do some operations on this device; None: torch does."""
    has_programs = device.type == "cuda" and describe(device).kernel == "cuda"
    return kernel_named("cuda", operations) if has_programs else None


def message_programs(rows: Tensor, index_code: str) -> Any:
    """The module whose programs write and read whole messages, of or as these rows; None: torch does."""
    is_known = index_code == "elias-fano" and math.prod(rows.shape[:-1]) <= MAX_ROWS
    return programs_on(rows.device, "codes") if is_known else None


def block_programs(tensor: Tensor, code: str, dtype: torch.dtype) -> Any:
    """The module whose programs code these values in blocks; None: torch does."""
    is_known = code in ("4bit", "2bit", "sign") and dtype in _RESIDUAL_DTYPES and tensor.numel() > 0
    return programs_on(tensor.device, "blocks") if is_known else None


def add_in_rank_order_(total: Tensor, indices: Tensor, values: Tensor, weights: Tensor) -> None:
    """Add w_n x_n of N sparse vectors, (N, m), to zeros, (J,): see `reference.sums`."""
    repeat(_add_weighted_, (), [total], [indices, values, weights])
    increment_version(total)  # torch does not see what is replayed


def _add_weighted_(total: Tensor, indices: Tensor, values: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    weighted = weights.unsqueeze(-1) * values
    sums.sum_sparse_in_rank_order(indices, weighted, total.numel(), out=total)
    return ()


def sum_dense_in_rank_order(rows: Tensor, weights: Tensor) -> Tensor:
    """sum_n w_n x_n, from zero, in rank order: see `reference.sums.sum_dense_in_rank_order`."""
    has_numpy = rows.device.type == "cpu" and _is_small(rows) and _wanted() != "reference"
    add = small_rows.sum_dense_in_rank_order if has_numpy else sums.sum_dense_in_rank_order
    return add(rows, weights)


def _is_small(vector: Tensor) -> bool:
    """Whether compiled loops and programs are not worth their calls; on a GPU a launch serves all rows."""
    device = vector.device.type
    return (vector.numel() if device == "cuda" else vector.shape[-1]) < SMALL_NUMEL.get(device, 0)


def _name_for(vector: Tensor, grad: Tensor | None = None) -> str:
    """The kernel for these tensors; numpy's does not count."""
    device = vector.device.type
    has_too_many_rows = device == "cuda" and vector.numel() > MAX_ROWS * vector.shape[-1]
    if _wanted() == "reference" or _is_small(vector) or has_too_many_rows:
        return "reference"
    if not _is_rows(vector, _RESIDUAL_DTYPES) or (grad is not None and not _is_rows(grad, _GRAD_DTYPES)):
        return "reference"
    choice = _describe_type(device)
    if choice.kernel == "reference":
        _notice(choice.reason)
    return choice.kernel


def _wanted() -> str:
    wanted = os.environ.get(VARIABLE, "auto")
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
def _describe_type(device: str) -> KernelChoice:
    if device not in _PACKAGES:
        return KernelChoice("reference", f"no fast kernel for device type {device!r}")
    package = _PACKAGES[device]
    try:
        kernel_named(device)
    except ImportError as error:
        advice = "'regtopk[kernels]'" if package == "numba" else "triton, which has wheels for Linux alone"
        return KernelChoice("reference", f"{package} is missing ({error}); try: pip install {advice}")
    except Exception as error:  # a package that does not fit the others may raise anything
        return KernelChoice("reference", f"{package} cannot be imported ({type(error).__name__}: {error})")
    return KernelChoice(device, f"{device} tensors, {package} {import_module(package).__version__}")


@cache
def _notice(reason: str) -> None:
    """Log once why the slow path is taken: a warning on rank 0, and for debugging on the other ranks."""
    rank = int(os.environ.get("RANK", "0"))  # as the launcher tells it
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    level = logging.WARNING if rank == 0 else logging.DEBUG
    _log.log(level, "regtopk selects with plain torch operations, which is slower: %s", reason)
