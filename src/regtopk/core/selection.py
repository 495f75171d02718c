"""Error feedback in one call: accumulate, select, code, and keep in the residual what was not sent."""

from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import is_lossless, quantise
from regtopk.core.sparse import SparseGradient


def take_largest_(
    residual: Tensor,
    grad: Tensor,
    k: int,
    *,
    code: str = "float32",
    damped: Tensor | None = None,
    damping: Tensor | None = None,
) -> SparseGradient:
    """residual := residual + grad - sent, where sent holds the k entries of largest score.

    score_j = |a_j| · damping_j (1 where j is not in ``damped``), a = residual + grad.
    """
    indices, values = kernels.take_largest_(residual, grad, k, damped=damped, damping=damping)
    sent = _code_(residual, indices, values, code)
    return SparseGradient(indices, sent, numel=residual.shape[-1], code=code)


def take_at_(residual: Tensor, grad: Tensor | None, indices: Tensor, *, code: str = "float32") -> Tensor:
    """residual := residual + grad - sent, where sent holds the entries at the given indices."""
    indices = indices.expand(*residual.shape[:-1], indices.shape[-1])
    return _code_(residual, indices, kernels.take_at_(residual, grad, indices), code)


def _code_(residual: Tensor, indices: Tensor, values: Tensor, code: str) -> Tensor:
    """What is sent of the values taken: the residual, zero there, gets back what the code loses."""
    if is_lossless(code):
        return values
    sent = quantise(values, code)
    residual.scatter_(-1, indices, values - sent)
    return sent
