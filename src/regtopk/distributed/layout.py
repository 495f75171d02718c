"""Gradients of several parameters as one flat vector."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from regtopk.core.state import accumulation_dtype
from regtopk.core.worker import Layout
from regtopk.distributed.parameters import Parameters


def layout_of(names: Iterable[str], parameters: Parameters) -> Layout:
    """The layout of some parameters, one after another."""
    kinds, shapes = parameters.kinds, parameters.shapes
    return Layout.of_shapes((name, shapes[name], kinds.get(name, "other")) for name in names)


def flat_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """What a flat gradient of these parameters is kept in."""
    dtype = torch.float32
    for p in parameters:
        dtype = torch.promote_types(dtype, accumulation_dtype(p.dtype))
    return dtype


def as_flat(grads: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The gradients as one vector, without a copy, if they lie one after another in memory."""
    first = grads[0]
    storage, end = first.untyped_storage().data_ptr(), first.data_ptr()
    for grad in grads:
        is_next = grad.untyped_storage().data_ptr() == storage and grad.data_ptr() == end
        if not is_next or grad.dtype != dtype or not grad.is_contiguous():
            return None
        end += grad.numel() * grad.itemsize
    return first.as_strided((sum(grad.numel() for grad in grads),), (1,))


def copy_to_flat_(flat: Tensor, grads: Iterable[Tensor]) -> None:
    """Write gradients one after another into a flat vector."""
    start = 0
    for grad in grads:
        flat[start : start + grad.numel()].view_as(grad).copy_(grad)
        start += grad.numel()


def copy_from_flat_(grads: Iterable[Tensor], flat: Tensor) -> None:
    """Write a flat vector back into gradients, one after another."""
    start = 0
    for grad in grads:
        grad.copy_(flat[start : start + grad.numel()].view_as(grad))
        start += grad.numel()


def subtract_flat_(tensors: Iterable[Tensor], flat: Tensor) -> None:
    """Subtract a flat vector from tensors, one after another."""
    start = 0
    for tensor in tensors:
        tensor.sub_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
