"""Sparse gradients: what a worker takes out of residual + gradient to send it, and where it belongs.

Functions that end in `_` do error feedback in one call: they accumulate, select, code, and keep in the
residual what was not sent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import is_lossless, quantise
from regtopk.errors import ArgumentError


@dataclass(frozen=True)
class SparseGradient:
    """The entries a worker sends: (..., m) indices and values of a vector of `numel` entries.

    Rows may be padded: only the first ``count`` entries of a row are valid. Every sum, size and code ignores
    the others. ``count`` is None where every row is full.

    Args:
        indices: (..., m) int64, ascending and distinct within the first ``count`` entries of a row.
        values: (..., m), as the receiver will see them (what a code lost is already gone).
        numel: J, the length of the dense vector.
        count: (...,) int64, or None.
        code: the value code whose grid the values lie on.
    """

    indices: Tensor
    values: Tensor
    numel: int
    count: Tensor | None = None
    code: str = "float32"

    @property
    def is_valid(self) -> Tensor | None:
        """(..., m) mask of the entries that are not padding; None where there is no padding."""
        if self.count is None:
            return None
        return torch.arange(self.indices.shape[-1], device=self.indices.device) < self.count[..., None]

    @property
    def counts(self) -> Tensor:
        """(...,) int64: how many entries each row holds, padding not counted."""
        if self.count is not None:
            return self.count
        *batch, capacity = self.indices.shape
        return torch.full(batch, capacity, dtype=torch.int64, device=self.indices.device)

    def without_padding(self) -> tuple[Tensor, Tensor]:
        """Indices and values with padding turned into entry 0 of value 0, harmless in any sum."""
        valid = self.is_valid
        if valid is None:
            return self.indices, self.values
        return self.indices.where(valid, 0), self.values.where(valid, 0)

    def weight_of_each(self, weight: Tensor) -> Tensor:
        """The worker's weight at every entry it sends, (..., m); zero in padding."""
        weights = weight.expand(self.indices.shape)
        return weights if self.is_valid is None else weights.where(self.is_valid, 0)


def index_set(indices: Tensor, numel: int, count: Tensor | None = None) -> SparseGradient:
    """Entries without values, as a message holds them when only their indices matter."""
    return SparseGradient(indices, torch.zeros_like(indices, dtype=torch.float32), numel, count, "none")


def take(dense: Tensor, indices: Tensor) -> Tensor:
    """Read a vector, (J,) or (..., J), at each worker's own indices, (..., m)."""
    if dense.dim() == 1:  # twice as fast as gather on a CPU
        return dense.index_select(0, indices.flatten()).view(indices.shape)
    batch = torch.broadcast_shapes(dense.shape[:-1], indices.shape[:-1])
    return dense.expand(*batch, dense.shape[-1]).gather(-1, indices.expand(*batch, indices.shape[-1]))


def to_dense(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """The vector of `numel` entries that holds the values at the (distinct) indices, else zero."""
    return values.new_zeros(*values.shape[:-1], numel).scatter_(-1, indices, values)


def read_at(dense: Tensor, sparse: SparseGradient) -> Tensor:
    """A vector, (..., J), where a worker sends, (..., m); zero in padding."""
    there = take(dense, sparse.without_padding()[0])
    return there if sparse.is_valid is None else there.where(sparse.is_valid, 0)


def clear_at_(dense: Tensor, sparse: SparseGradient) -> None:
    """Zero a vector, (..., J), where a worker sends."""
    indices, _ = sparse.without_padding()
    dense.scatter_add_(-1, indices, -read_at(dense, sparse))  # adds: padding must not touch entry 0


def take_largest_(
    residual: Tensor,
    grad: Tensor,
    k: int,
    *,
    chunk: int | None = None,
    code: str = "float32",
    damped: Tensor | None = None,
    scores: Tensor | None = None,
) -> SparseGradient:
    """residual := residual + grad - sent, where sent holds the k entries of largest score.

    a = residual + grad, score_j = |a_j|, or what ``scores`` says where j is in ``damped``, which ascends.
    With a ``chunk`` the k largest of every run of so many entries are sent, and all of a shorter last one.
    """
    kernel, given = kernels.kernel_for(residual, grad), _checked(damped, scores)
    indices, values = kernel.take_largest_(residual, grad, k, given, chunk)
    return _sent_(residual, indices, values, code)


def find_largest_(
    residual: Tensor, grad: Tensor, k: int, *, damped: Tensor | None = None, scores: Tensor | None = None
) -> Tensor:
    """residual := residual + grad; the indices of the k largest scores, (..., k), which are left there."""
    taken = take_largest_(residual, grad, k, damped=damped, scores=scores)
    residual.scatter_(-1, taken.indices, taken.values)
    return taken.indices


def take_above_(
    residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int, *, code: str = "float32"
) -> SparseGradient:
    """residual := residual + grad - sent, where sent holds the entries of |a| >= threshold.

    Of more than ``capacity`` of them in a row the first are taken; the others stay in the residual.
    """
    kernel = kernels.kernel_for(residual, grad)
    return send_(residual, kernel.take_above_(residual, grad, threshold, capacity), code)


def take_all_above_(
    residual: Tensor, grad: Tensor, threshold: Tensor, expected: int, *, code: str = "float32"
) -> SparseGradient:
    """The same without a limit; a second pass is needed if more than twice the expected number reach it."""
    kernel, capacity = kernels.kernel_for(residual, grad), min(residual.shape[-1], 2 * expected)
    taken = kernel.take_above_(residual, grad, threshold, capacity)
    if bool(taken.num_left.any()):
        put_back_(residual, taken)
        taken = kernel.take_above_(residual, None, threshold, int(taken.num_found.max()))
    return send_(residual, taken, code)


def send_(residual: Tensor, taken: kernels.Taken, code: str) -> SparseGradient:
    """Code what a threshold took; the residual gets back what the code loses."""
    width = _width(taken.count)
    return _sent_(residual, taken.indices[..., :width], taken.values[..., :width], code, taken.count)


def put_back_(residual: Tensor, taken: kernels.Taken) -> None:
    """Undo a selection, so that another threshold can be tried."""
    residual.scatter_add_(-1, taken.indices, taken.values)


def take_where_(residual: Tensor, is_taken: Tensor, *, code: str = "float32") -> SparseGradient:
    """residual := residual - sent, where sent holds the entries of a mask, (..., J)."""
    row, entry = is_taken.reshape(-1, residual.shape[-1]).nonzero(as_tuple=True)
    count = is_taken.sum(-1)
    first = count.flatten().cumsum(0) - count.flatten()
    place = torch.arange(row.numel(), device=row.device) - first[row]
    indices = row.new_zeros(*count.shape, _width(count))
    indices.view(-1, indices.shape[-1])[row, place] = entry
    is_valid = torch.arange(indices.shape[-1], device=row.device) < count.unsqueeze(-1)
    values = residual.gather(-1, indices).where(is_valid, 0.0)
    residual.masked_fill_(is_taken, 0.0)
    return _sent_(residual, indices, values, code, count)


def take_at_(residual: Tensor, grad: Tensor | None, indices: Tensor, *, code: str = "float32") -> Tensor:
    """residual := residual + grad - sent, where sent holds the entries at the given indices."""
    indices = indices.expand(*residual.shape[:-1], indices.shape[-1])
    return _sent_(residual, indices, kernels.take_at_(residual, grad, indices), code).values


def send_instead_(residual: Tensor, taken: SparseGradient, values: Tensor, code: str) -> SparseGradient:
    """residual := residual + taken - sent, where sent holds other values, (..., m), at the entries taken.

    What was taken is uncoded, and the code must have blocks: it leaves zeros in the padding.
    """
    sent = quantise(values, code, taken.count)
    residual.scatter_add_(-1, taken.indices, taken.values - sent)
    return SparseGradient(taken.indices, sent, taken.numel, taken.count, code)


def _checked(damped: Tensor | None, scores: Tensor | None) -> kernels.Damped | None:
    """Refuse what the kernels would misread. A GPU is not waited for: there it is not looked at."""
    if damped is None or scores is None:
        return None
    is_on_cpu = damped.device.type == "cpu"
    if is_on_cpu and not bool((is_next := damped[..., 1:] > damped[..., :-1]).all()):
        *row, place = (~is_next).nonzero()[0].tolist()
        first, second = damped[tuple(row)][place : place + 2].tolist()
        raise ArgumentError(f"damped must hold each entry once, ascending, got {first} before {second}")
    return kernels.Damped(damped, scores)


def _width(count: Tensor) -> int:
    """The count of the fullest row, at least 1. Reads one number back, so that nothing J-sized is coded."""
    return max(1, int(count.max()))


def _sent_(
    residual: Tensor, indices: Tensor, values: Tensor, code: str, count: Tensor | None = None
) -> SparseGradient:
    """Code the values taken; the residual, zero there, gets back what the code loses."""
    if not is_lossless(code):
        (sent,) = kernels.repeat(_quantised, (code,), (), [values] if count is None else [values, count])
        residual.scatter_add_(-1, indices, values - sent)  # adds: padding must not erase entry 0
        values = sent
    return SparseGradient(indices, values, residual.shape[-1], count, code)


def _quantised(code: str, values: Tensor, *count: Tensor) -> tuple[Tensor, ...]:
    return (quantise(values, code, *count),)
