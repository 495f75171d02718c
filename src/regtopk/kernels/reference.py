"""Plain torch kernels: the readable ones, and the oracle of every fast one.

All of them work on the last dimension, so one call serves a single worker, (J,), and a batch, (N, J).
"""

import math

import torch
from torch import Tensor


def take_largest_(
    residual: Tensor,
    grad: Tensor,
    k: int,
    *,
    damped: Tensor | None = None,
    damping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accumulate, take the k entries of largest score, and clear them from the residual.

    a = residual + grad · score_j = |a_j| · damping_j (1 where j is not in ``damped``)
    s = the k largest scores · residual := a - a[s], that is: zero on s.

    Args:
        residual: (..., J), float32 or float64; changed in place.
        grad: (..., J), any floating dtype; not changed.
        k: how many entries to take, 1 <= k <= J.
        damped: (..., m) int64, distinct entries whose score is rescaled.
        damping: (..., m), their factors, in the residual's dtype.

    Returns:
        The indices, (..., k) int64 in ascending order, and the accumulated values there.
    """
    residual.add_(grad)
    score = residual.abs()
    if damped is not None and damping is not None and damped.shape[-1] > 0:
        score.scatter_(-1, damped, score.gather(-1, damped) * damping)
    indices = score.topk(k, dim=-1, sorted=False).indices
    indices = indices.sort(dim=-1).values
    values = residual.gather(-1, indices)
    residual.scatter_(-1, indices, 0.0)
    return indices, values


def take_at_(residual: Tensor, grad: Tensor | None, indices: Tensor) -> Tensor:
    """Accumulate (if a gradient is given), and take the entries at the given indices.

    Args:
        residual: (..., J), changed in place: zero at the indices afterwards.
        grad: (..., J), or None if it was already accumulated.
        indices: (..., m) int64 with the residual's leading dimensions.

    Returns:
        The accumulated values there, (..., m).
    """
    if grad is not None:
        residual.add_(grad)
    values = residual.gather(-1, indices)
    residual.scatter_(-1, indices, 0.0)
    return values


def sum_sparse_in_rank_order(indices: Tensor, values: Tensor, numel: int) -> Tensor:
    """Add N sparse vectors into one dense vector, from zero, in rank order.

    Args:
        indices: (..., N, m) int64, distinct within a row where the values are not zero.
        values: (..., N, m), float32 or float64.
        numel: J.

    Returns:
        (..., J) in the dtype of the values, the same bits on every rank and in the simulator.
    """
    total = values.new_zeros(*values.shape[:-2], numel)
    if total.device.type == "cpu":  # scatter_add_ walks a row in order there: one call does it
        return total.scatter_add_(-1, indices.flatten(-2), values.flatten(-2))
    for rank in range(indices.shape[-2]):  # elsewhere it is atomic: one call a rank keeps the order
        total.scatter_add_(-1, indices[..., rank, :], values[..., rank, :])
    return total


def sum_dense_in_rank_order(rows: Tensor, weights: Tensor) -> Tensor:
    """sum_n w_n x_n, from zero, in rank order.

    Args:
        rows: (..., N, m), any floating dtype.
        weights: (N,), in the dtype of the sum (float32 or float64).
    """
    weighted = rows * weights.unsqueeze(-1)
    total = weighted.new_zeros(*rows.shape[:-2], rows.shape[-1])
    for row in weighted.unbind(-2):
        total += row
    return total


def find_non_finite_row(grad: Tensor) -> int | None:
    """The first row of (..., J), counted over all leading dimensions, that holds a NaN or inf."""
    extremes = torch.stack(torch.aminmax(grad))  # aminmax carries a NaN through
    if all(math.isfinite(x) for x in extremes.tolist()):
        return None
    is_finite = torch.isfinite(grad).reshape(-1, grad.shape[-1]).all(-1)
    return int((~is_finite).int().argmax())
