"""The operations that touch all J entries; everything else in the package is k-sized.

`reference` is plain torch and the oracle that every faster kernel is tested against. Faster ones are
`cpu` (compiled by numba) and `triton` (CUDA), and `small_rows` (numpy) for short rows; `dispatch` chooses,
by device, dtype and layout, and imports the compiled ones on first use. REGTOPK_KERNELS=reference in the
environment forces the reference.
"""

import torch
from torch import Tensor

from regtopk.kernels import reference
from regtopk.kernels.dispatch import Choice, describe, kernel_for, kernel_for_sums
from regtopk.kernels.reference import Taken, estimate_threshold, sum_sparse_in_rank_order, take_at_
from regtopk.kernels.self_check import SelfCheck, self_check

__all__ = [
    "Choice",
    "SelfCheck",
    "Taken",
    "describe",
    "draw_on_gpu",
    "estimate_threshold",
    "find_non_finite_row",
    "reference",
    "self_check",
    "sum_dense_in_rank_order",
    "sum_sparse_in_rank_order",
    "take_above_",
    "take_at_",
    "take_largest_",
    "take_largest_per_chunk_",
]


def take_largest_(
    residual: Tensor,
    grad: Tensor,
    k: int,
    *,
    damped: Tensor | None = None,
    damping: Tensor | None = None,
    non_finite: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accumulate, take the k entries of largest score: see `reference.take_largest_`."""
    taken: tuple[Tensor, Tensor] = kernel_for(residual, grad).take_largest_(
        residual, grad, k, damped=damped, damping=damping, non_finite=non_finite
    )
    return taken


def take_largest_per_chunk_(
    residual: Tensor,
    grad: Tensor,
    chunk: int,
    k_per_chunk: int,
    *,
    damped: Tensor | None = None,
    damping: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same for every chunk of the vector: see `reference.take_largest_per_chunk_`."""
    taken: tuple[Tensor, Tensor] = kernel_for(residual, grad).take_largest_per_chunk_(
        residual, grad, chunk, k_per_chunk, damped=damped, damping=damping
    )
    return taken


def take_above_(residual: Tensor, grad: Tensor | None, threshold: float | Tensor, capacity: int) -> Taken:
    """Accumulate, take the entries that reach a threshold: see `reference.take_above_`."""
    taken: Taken = kernel_for(residual, grad).take_above_(residual, grad, threshold, capacity)
    return taken


def find_non_finite_row(grad: Tensor) -> int | None:
    """The first row that holds a NaN or inf: see `reference.find_non_finite_row`."""
    row: int | None = kernel_for(None, grad).find_non_finite_row(grad)
    return row


def draw_on_gpu(numel: int, k: int, bits: int, state: int, num_rounds: int, device: torch.device) -> Tensor:
    """k distinct entries of 0..J-1 without the host: see `triton_random.draw`."""
    from regtopk.kernels.triton_random import draw

    return draw(numel, k, bits, state, num_rounds, device)


def sum_dense_in_rank_order(rows: Tensor, weights: Tensor) -> Tensor:
    """sum_n w_n x_n, from zero, in rank order: see `reference.sum_dense_in_rank_order`."""
    total: Tensor = kernel_for_sums(rows).sum_dense_in_rank_order(rows, weights)
    return total
