"""A vector that lies in pieces, in plain torch."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pieces(list[Tensor]):
    """Tensors that make one vector, in this order, as long as none of them gets other memory."""

    table: dict[str, Any] | None = None  # what a kernel has found out about where they lie


class Support(NamedTuple):
    """Entries outside of which a vector is zero; some may be named twice."""

    indices: Tensor  # (N, m) int64; the first counts[n] of row n are ascending, the others count for nothing
    counts: Tensor  # (N,) int64


def join_(vector: Tensor, pieces: Sequence[Tensor], start: Sequence[Tensor] | None = None) -> Tensor:
    """Write pieces one after another into a vector, (J,), and say whether all of it is finite, ().

    A piece may have any dtype and memory layout. A start has its shape, the vector's dtype, and no gaps: then
    start - piece is written, start being rounded to the piece's dtype first.
    """
    parts = parts_of(vector, pieces)
    if start is None:
        torch._foreach_copy_(parts, list(pieces))
    else:
        for part, piece, first in zip(parts, pieces, start, strict=True):
            subtract_from(first, piece, part)
    return is_finite(vector)


def subtract_from(start: Tensor, piece: Tensor, out: Tensor) -> Tensor:
    """start - piece; a piece of lower precision can only be told from start as far as that goes."""
    if piece.dtype == out.dtype:
        return torch.sub(start, piece, out=out)
    return out.copy_(start.to(piece.dtype)).sub_(piece)


def spread_(pieces: Sequence[Tensor], vector: Tensor, support: Support) -> None:
    """Write a vector, (J,), that is zero outside of its support into pieces, one after another.

    Entries past the counts of the support must be entries of the vector.
    """
    is_plain = pieces[0].dtype == vector.dtype and pieces[0].is_contiguous()
    if len(pieces) > 1 or not is_plain:  # a launch for every piece would cost more than to copy all of it
        torch._foreach_copy_(list(pieces), parts_of(vector, pieces))
        return
    indices = support.indices.flatten()
    pieces[0].zero_().view(-1).scatter_(0, indices, vector.index_select(0, indices))


def overwrite_if_(flag: Tensor, pieces: Sequence[Tensor], source: Sequence[Tensor] | float) -> None:
    """Write a source over pieces, if a flag on their device says so: the host does not wait for it.

    The source is a tensor for each piece, of its shape and dtype; or 0.0 or NaN for all entries.
    """
    if not isinstance(source, float):
        for piece, other in zip(pieces, source, strict=True):
            torch.where(flag, other, piece, out=piece)
    elif math.isnan(source):  # also what is inf
        torch._foreach_mul_(list(pieces), torch.where(flag, source, 1.0))
    else:
        assert source == 0
        for piece in pieces:
            piece.masked_fill_(flag, 0)


def parts_of(vector: Tensor, pieces: Sequence[Tensor]) -> list[Tensor]:
    """The part of a vector that belongs to each piece, in its shape (views)."""
    parts = vector.split([piece.numel() for piece in pieces])
    return [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]


def is_finite(vector: Tensor) -> Tensor:
    """Whether no entry is NaN or inf, (): a device is not waited for."""
    if vector.device.type == "cpu" and bool(vector.sum().isfinite()):  # three times as fast as the extremes
        return torch.tensor(True)
    return torch.stack(torch.aminmax(vector)).isfinite().all()  # a sum may overflow by itself
