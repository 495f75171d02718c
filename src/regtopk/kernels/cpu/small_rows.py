"""Short rows on the CPU, in numpy: calling torch's operations costs more than their work.

The k-th largest score is found without the indices (numpy's partition uses vector instructions), and which
entries reach it is read off in order, so there is nothing to sort. Rows where equal scores straddle the
threshold, or that hold a NaN, are left to the reference: the results are its own bits.
"""

import numpy as np
import torch
from torch import Tensor

from regtopk.kernels.reference import selection as reference
from regtopk.kernels.reference.selection import Damped, take_above_

__all__ = ["sum_dense_in_rank_order", "take_above_", "take_largest_"]

_SCARCE = 64  # if at most one of 64 entries is taken, torch is as fast


def take_largest_(
    residual: Tensor, grad: Tensor, k: int, damped: Damped | None = None, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `reference.selection.take_largest_`."""
    numel = residual.shape[-1]
    if chunk is not None or _SCARCE * k <= numel:
        return reference.take_largest_(residual, grad, k, damped, chunk)
    residual.add_(grad)
    score = reference.score_of(residual, damped)
    rows = score.numpy().reshape(-1, numel)
    ordered = rows.copy()
    ordered.partition(numel - k)
    reaching = (rows >= ordered[:, numel - k, None]).ravel().nonzero()[0]
    if reaching.size != len(rows) * k:
        indices = reference.largest(score, k)
        return indices, reference.take_at_(residual, None, indices)
    accumulated = residual.view(-1).numpy()
    values = accumulated[reaching]
    accumulated[reaching] = 0.0
    indices_by_row = reaching.reshape(-1, k) - np.arange(0, rows.size, numel)[:, None]
    shape = *residual.shape[:-1], k
    return torch.from_numpy(indices_by_row).view(shape), torch.from_numpy(values).view(shape)


def sum_dense_in_rank_order(rows: Tensor, weights: Tensor) -> Tensor:
    """See `reference.sums.sum_dense_in_rank_order`."""
    weighted = (rows * weights.unsqueeze(-1)).numpy()
    total = np.zeros_like(weighted[..., 0, :])
    for rank in range(weighted.shape[-2]):
        total += weighted[..., rank, :]
    return torch.from_numpy(total)
