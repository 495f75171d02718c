"""Gradients of several parameters as one flat vector."""

from collections.abc import Callable, Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor, nn

from regtopk import kernels


class ByName(dict[str, Tensor]):
    """Tensors by name. Those of a bucket are put in a row once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._rows: dict[tuple[str, ...], kernels.Pieces] = {}

    def row(self, names: tuple[str, ...]) -> kernels.Pieces:
        """The tensors of a bucket's names."""
        if names not in self._rows:
            self._rows[names] = kernels.Pieces(map(self.__getitem__, names))
        return self._rows[names]


# What is done with a vector of some parameters, by name; it is zero outside of its support, if it has one.
Write = Callable[[tuple[str, ...], Tensor, kernels.Support | None], None]


def flat_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """What a flat gradient of these parameters is kept in: at least float32."""
    return reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)


def as_flat(grads: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The gradients as one vector, without a copy, if they lie one after another in memory."""
    first, numel = grads[0], 0
    start = first.data_ptr()
    for grad in grads:
        is_next = grad.data_ptr() == start + numel * dtype.itemsize
        if not is_next or grad.dtype != dtype or not grad.is_contiguous():
            return None
        numel += grad.numel()
    storage = first.untyped_storage()
    is_one = start + numel * dtype.itemsize <= storage.data_ptr() + storage.nbytes()
    return first.as_strided((numel,), (1,)) if is_one else None


def into(targets: Mapping[str, Tensor], write: Callable[..., None] | None = None) -> Write:
    """Write into the tensors of some names; or `subtract_` from them."""
    write, by_name = write or write_, targets if isinstance(targets, ByName) else ByName(targets)
    return lambda names, *vector: write(by_name.row(names), *vector)


def write_(tensors: list[Tensor], vector: Tensor, support: kernels.Support | None = None) -> None:
    """Write a vector into tensors, one after another; it is zero outside of its support, if there is one."""
    if support is None:
        torch._foreach_copy_(tensors, kernels.parts_of(vector, tensors))
        return
    flat = as_flat(tensors, vector.dtype)
    kernels.spread_(tensors if flat is None else [flat], vector, support)


def subtract_(tensors: list[Tensor], vector: Tensor, support: kernels.Support | None = None) -> None:
    """Subtract a vector from tensors, one after another; it is zero outside of its support."""
    flat = as_flat(tensors, vector.dtype)
    if support is None or flat is None:
        torch._foreach_sub_(tensors, kernels.parts_of(vector, tensors))
    else:
        indices = support.indices.flatten()  # an entry named twice gets the same difference twice
        difference = flat.index_select(0, indices).sub_(vector.index_select(0, indices))
        flat.scatter_(0, indices, difference)
