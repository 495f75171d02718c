"""A vector on the CPU that lies in pieces: the gradients of a model, and the one vector that is exchanged.

torch's own operations wait for all their threads once per piece, which takes longer than their work where
cores are shared. Here threads take piece after piece, and a piece is looked at while it is copied.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from regtopk.kernels.cpu.compiled import Array, compiled
from regtopk.kernels.cpu.rows import cut
from regtopk.kernels.cpu.threads import side_by_side
from regtopk.kernels.reference.pieces import Support, parts_of, subtract_from


def join_(vector: Tensor, pieces: Sequence[Tensor], start: Sequence[Tensor] | None = None) -> Tensor:
    """See `reference.pieces.join_`."""
    increment_version(vector)  # torch does not see what is written by numpy
    copies, differences = [], []
    firsts = [None] * len(pieces) if start is None else start
    for part, piece, first in zip(parts_of(vector, pieces), pieces, firsts, strict=True):
        stretches = cut(piece.numel(), torch.get_num_threads())
        if first is not None and _is_plain(piece, vector):
            arrays = [tensor.detach().view(-1).numpy() for tensor in (part, first, piece)]
            differences += [tuple(array[a:b] for array in arrays) for a, b in stretches]
            continue
        source = piece
        if not _is_plain(piece, vector):  # torch converts; what is left to do is to look at it
            source = part.copy_(piece) if first is None else subtract_from(first, piece, part)
        target_keys, source_keys = _keys(part), _keys(source)
        copies += [(target_keys[a:b], source_keys[a:b]) for a, b in stretches]
    largest, are_bad = max(side_by_side(_copy_, copies), default=0), side_by_side(_subtract_, differences)
    is_finite = largest < _keys(vector.new_tensor([torch.inf]))[0] and not any(are_bad)
    return torch.tensor(bool(is_finite))


def spread_(pieces: Sequence[Tensor], vector: Tensor, support: Support) -> None:
    """See `reference.pieces.spread_`. Pieces are cleared in the cache, to be written next."""
    entries, indices, counts = vector.numpy(), support.indices.numpy(), support.counts.numpy()
    tasks, converted, first = [], [], 0
    for piece in pieces:
        target = piece
        if not _is_plain(piece, vector):
            target = vector.new_empty(piece.shape)
            converted.append((piece, target))
        flat = target.detach().view(-1).numpy()
        for start, stop in cut(piece.numel(), torch.get_num_threads()):
            tasks.append((flat[start:stop], entries, first + start, indices, counts))
        first += piece.numel()
    side_by_side(_copy_support_, tasks)
    for piece, target in converted:
        piece.copy_(target)


def _is_plain(piece: Tensor, vector: Tensor) -> bool:
    return piece.dtype == vector.dtype and piece.is_contiguous()


def _keys(tensor: Tensor) -> Array:
    """The memory of a tensor as unsigned integers."""
    numpy: Array = tensor.detach().view(-1).numpy()
    return numpy.view(np.uint32 if tensor.itemsize == 4 else np.uint64)


@compiled
def _copy_(target: Array, source: Array) -> Any:
    """target := source; returns the largest key (see `cpu.loops`)."""
    key_type = source.dtype.type
    mask = key_type(~key_type(0)) >> key_type(1)  # clears the sign
    largest = key_type(0)
    for i in range(source.size):
        target[i] = source[i]
        largest = max(largest, key_type(source[i] & mask))
    return largest


@compiled
def _subtract_(target: Array, start: Array, source: Array) -> Any:
    """target := start - source; returns whether an entry is NaN or inf."""
    is_bad = False
    for i in range(source.size):
        entry = start[i] - source[i]
        target[i] = entry
        is_bad |= not (abs(entry) < np.inf)
    return is_bad


@compiled
def _copy_support_(target: Array, vector: Array, start: int, indices: Array, counts: Array) -> None:
    """target := vector[start : start + size], which is zero but at the given indices."""
    target[:] = 0
    stop = start + target.size
    for n in range(counts.size):
        row = indices[n, : counts[n]]
        for i in range(np.searchsorted(row, start), row.size):
            if row[i] >= stop:
                break
            target[row[i] - start] = vector[row[i]]
