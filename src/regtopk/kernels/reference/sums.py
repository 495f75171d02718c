"""Sums in rank order, in plain torch: the same bits on every rank and in the simulator."""

import math

import torch
from torch import Tensor


def sum_sparse_in_rank_order(
    indices: Tensor, values: Tensor, numel: int, out: Tensor | None = None
) -> Tensor:
    """Add N sparse vectors, (..., N, m), into one dense vector, (..., J), from zero, in rank order.

    Indices are distinct within a row where the values are not zero. `out` are zeros to write to.
    """
    total = values.new_zeros(*values.shape[:-2], numel) if out is None else out
    if total.device.type == "cpu":  # scatter_add_ walks a row in order there: one call does it
        return total.scatter_add_(-1, indices.flatten(-2), values.flatten(-2))
    for rank in range(indices.shape[-2]):  # elsewhere it is atomic: one call per rank keeps the order
        if total.dim() == 1:  # index_add_ fills a GPU with fewer entries than scatter_add_ does
            total.index_add_(0, indices[rank], values[rank])
        else:
            total.scatter_add_(-1, indices[..., rank, :], values[..., rank, :])
    return total


def sum_dense_in_rank_order(rows: Tensor, weights: Tensor) -> Tensor:
    """sum_n w_n x_n of rows (..., N, m), from zero, in rank order and in the dtype of the weights, (N,)."""
    weighted = rows * weights.unsqueeze(-1)
    total = weighted.new_zeros(*rows.shape[:-2], rows.shape[-1])
    for row in weighted.unbind(-2):
        total += row
    return total


def find_non_finite_row(grad: Tensor) -> int | None:
    """The first row of (..., J), counted over all leading dimensions, that holds a NaN or inf."""
    if math.isfinite(grad.sum(dtype=torch.float32 if grad.itemsize < 4 else None).item()):
        return None  # a NaN or inf would be carried through; a sum that overflows by itself is looked at
    is_finite = torch.isfinite(grad).reshape(-1, grad.shape[-1]).all(-1)
    return None if bool(is_finite.all()) else int((~is_finite).int().argmax())
