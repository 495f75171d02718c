"""A tensor's memory, row by row, as the loops on a CPU read it."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from regtopk.kernels.cpu import loops
from regtopk.kernels.cpu.compiled import Array
from regtopk.kernels.reference.selection import Damped

Stretch = tuple[int, int]  # of a row, from the first number to the second
_SMALL_STRETCH = 1 << 17  # fewer entries are not worth a thread of their own
_MAX_STRETCHES = 16  # more threads would wait for memory, and each takes some


class Row(NamedTuple):
    """The memory of one row, in the order of the loops' first parameters."""

    accumulated: Array
    bits: Array
    grad: Array
    kind: int
    mask: Any
    damped: Array
    scores: Array
    saved: Array


def rows_of(residual: Tensor, grad: Tensor | None, damped: Damped | None) -> list[Row]:
    """Each row's memory, which the loops will change."""
    increment_version(residual)  # torch does not see what is written through numpy
    key_type = np.uint32 if residual.dtype == torch.float32 else np.uint64
    mask = key_type((1 << (8 * residual.itemsize - 1)) - 1)
    accumulated = flat(residual)
    if damped is None:
        batch = residual.shape[:-1]
        damped = Damped(residual.new_empty(*batch, 0, dtype=torch.int64), residual.new_empty(*batch, 0))
    kind = loops.NOTHING if grad is None else loops.NATIVE
    if grad is not None and grad.dtype == torch.bfloat16:
        kind, grad = loops.BFLOAT16, grad.view(torch.uint16)
    elif grad is not None and grad.dtype == torch.float16:  # rare on a CPU
        grad = grad.float()
    grads = accumulated if grad is None else flat(grad)
    given = (flat(tensor.contiguous()) for tensor in damped)
    return [
        Row(a, a.view(key_type), g, kind, mask, where, score, np.empty(where.size, a.dtype))
        for a, g, where, score in zip(accumulated, grads, *given, strict=True)
    ]


def flat(tensor: Tensor) -> Array:
    """The rows of a tensor, (rows, m), sharing its memory."""
    *batch, size = tensor.shape
    numpy: Array = tensor.detach().view(math.prod(batch), size).numpy()
    return numpy


def outputs(residual: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Memory for indices and values, (..., size)."""
    batch = residual.shape[:-1]
    return torch.empty(*batch, size, dtype=torch.int64), residual.new_empty(*batch, size)


def cut(numel: int, num_threads: int, multiple_of: int = loops.LINE) -> list[Stretch]:
    """The stretches of a row: several per thread, so that a slow thread can take fewer."""
    num = min(4 * num_threads, _MAX_STRETCHES, numel // _SMALL_STRETCH) if num_threads > 1 else 1
    size = max(1, math.ceil(numel / max(1, num) / multiple_of)) * multiple_of
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]
