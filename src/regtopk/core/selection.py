"""Error feedback in one call: accumulate, select, code, and keep in the residual what was not sent."""

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import is_lossless, quantise
from regtopk.core.sparse import SparseGradient
from regtopk.errors import ArgumentError


def take_largest_(
    residual: Tensor,
    grad: Tensor,
    k: int,
    *,
    code: str = "float32",
    damped: Tensor | None = None,
    scores: Tensor | None = None,
) -> SparseGradient:
    """residual := residual + grad - sent, where sent holds the k entries of largest score.

    a = residual + grad, score_j = |a_j|, or what ``scores`` says where j is in ``damped``, which ascends.
    """
    kernel = kernels.kernel_for(residual, grad)
    indices, values = kernel.take_largest_(residual, grad, k, _checked(damped, scores))
    sent = _code_(residual, indices, values, code)
    return SparseGradient(indices, sent, numel=residual.shape[-1], code=code)


def take_largest_per_chunk_(
    residual: Tensor,
    grad: Tensor,
    chunk: int,
    k_per_chunk: int,
    *,
    code: str = "float32",
    damped: Tensor | None = None,
    scores: Tensor | None = None,
) -> SparseGradient:
    """The same with the k largest scores of every chunk; all of a last chunk that is shorter."""
    kernel = kernels.kernel_for(residual, grad)
    given = _checked(damped, scores)
    indices, values = kernel.take_largest_per_chunk_(residual, grad, chunk, k_per_chunk, given)
    sent = _code_(residual, indices, values, code)
    return SparseGradient(indices, sent, numel=residual.shape[-1], code=code)


def take_above_(
    residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int, *, code: str = "float32"
) -> SparseGradient:
    """residual := residual + grad - sent, where sent holds the entries of |a| >= threshold.

    Of more than ``capacity`` of them in a row the first are taken; the others stay in the residual.
    """
    return send_(residual, kernels.take_above_(residual, grad, threshold, capacity), code)


def take_all_above_(
    residual: Tensor, grad: Tensor, threshold: Tensor, expected: int, *, code: str = "float32"
) -> SparseGradient:
    """The same without a limit; a second pass is needed if more than twice the expected number reach it."""
    capacity = min(residual.shape[-1], 2 * expected)
    taken = kernels.take_above_(residual, grad, threshold, capacity)
    if bool(taken.num_left.any()):
        put_back_(residual, taken)
        taken = kernels.take_above_(residual, None, threshold, int(taken.num_found.max()))
    return send_(residual, taken, code)


def send_(residual: Tensor, taken: kernels.Taken, code: str) -> SparseGradient:
    """Code what a threshold took; the residual gets back what the code loses."""
    width = _width(taken.count)
    indices, values = taken.indices[..., :width], taken.values[..., :width]
    sent = _code_(residual, indices, values, code, taken.count)
    return SparseGradient(indices, sent, residual.shape[-1], taken.count, code)


def put_back_(residual: Tensor, taken: kernels.Taken) -> None:
    """Undo a selection, so that another threshold can be tried."""
    residual.scatter_add_(-1, taken.indices, taken.values)


def take_where_(residual: Tensor, is_taken: Tensor, *, code: str = "float32") -> SparseGradient:
    """residual := residual - sent, where sent holds the entries of a mask, (..., J)."""
    numel = residual.shape[-1]
    row, entry = is_taken.reshape(-1, numel).nonzero(as_tuple=True)
    count = is_taken.sum(-1)
    first = count.flatten().cumsum(0) - count.flatten()
    place = torch.arange(row.numel(), device=row.device) - first[row]
    indices = row.new_zeros(*count.shape, _width(count))
    indices.view(-1, indices.shape[-1])[row, place] = entry
    is_valid = torch.arange(indices.shape[-1], device=row.device) < count.unsqueeze(-1)
    values = residual.gather(-1, indices).where(is_valid, 0.0)
    residual.masked_fill_(is_taken, 0.0)
    return SparseGradient(indices, _code_(residual, indices, values, code, count), numel, count, code)


def send_instead_(residual: Tensor, taken: SparseGradient, values: Tensor, code: str) -> SparseGradient:
    """residual := residual + taken - sent, where sent holds other values, coded, at the entries taken.

    Args:
        residual: (..., J), changed in place.
        taken: what was taken from it, uncoded.
        values: (..., m), what to send in its place.
        code: a code with blocks: it leaves zeros in the padding.
    """
    sent = quantise(values, code, taken.count)
    residual.scatter_add_(-1, taken.indices, taken.values - sent)
    return SparseGradient(taken.indices, sent, taken.numel, taken.count, code)


def find_largest_(
    residual: Tensor, grad: Tensor, k: int, *, damped: Tensor | None = None, scores: Tensor | None = None
) -> Tensor:
    """residual := residual + grad; the indices of the k largest scores, (..., k), which are left there."""
    kernel = kernels.kernel_for(residual, grad)
    indices, values = kernel.take_largest_(residual, grad, k, _checked(damped, scores))
    residual.scatter_(-1, indices, values)
    return indices


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


def kth_largest(vector: Tensor, k: int) -> Tensor:
    """The k-th largest magnitude of a vector, (..., J) gives (...,); the vector is not changed."""
    nothing = torch.zeros_like(vector)
    _, values = kernels.kernel_for(nothing, vector).take_largest_(nothing, vector, k)
    return values.abs().amin(-1)


def take_at_(residual: Tensor, grad: Tensor | None, indices: Tensor, *, code: str = "float32") -> Tensor:
    """residual := residual + grad - sent, where sent holds the entries at the given indices."""
    indices = indices.expand(*residual.shape[:-1], indices.shape[-1])
    return _code_(residual, indices, kernels.take_at_(residual, grad, indices), code)


def _width(count: Tensor) -> int:
    """The count of the fullest row, at least 1. Reads one number back, so that nothing J-sized is coded."""
    return max(1, int(count.max()))


def _code_(
    residual: Tensor, indices: Tensor, values: Tensor, code: str, count: Tensor | None = None
) -> Tensor:
    """Code the values taken; the residual, zero there, gets back what the code loses."""
    if is_lossless(code):
        return values
    (sent,) = kernels.repeat(_quantised, (code,), (), [values] if count is None else [values, count])
    residual.scatter_add_(-1, indices, values - sent)  # adds: padding, zeros for entry 0, must not erase it
    return sent


def _quantised(code: str, values: Tensor, *count: Tensor) -> tuple[Tensor, ...]:
    return (quantise(values, code, *count),)
