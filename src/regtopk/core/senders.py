"""Who sent an entry: what a sparse sum can tell beside the sum, and what follows for those who did not."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from regtopk import kernels
from regtopk.core.sparse import SparseGradient, read_at, take, write_at_


@dataclass(frozen=True)
class OfSenders:
    """The answer to `SenderSum`: the sum, and what each entry is to those who sent it.

    Entries may be named twice, with the same mean, and entries that nobody sent may be among them: their mean
    here is zero. So what is done with the means is written to an entry, not added to it.

    Args:
        total: (J,), S = sum_n w_n x_n.
        indices: (u,) int64, all entries that some worker sent.
        mean: (u,), m = S / W there, W being the summed weights of the workers that sent the entry.
        missing: (u,), the summed weights of those that did not; exactly zero if all did.
    """

    total: Tensor
    indices: Tensor
    mean: Tensor
    missing: Tensor

    @classmethod
    def of(cls, total: Tensor, sent_weight: Tensor, indices: Tensor, weights: Tensor) -> "OfSenders":
        """From dense sums.

        Args:
            total: (..., J).
            sent_weight: (..., J), W, added in rank order from zero.
            indices: (..., u), where to look.
            weights: (N,), of all workers.
        """
        if indices.shape[-1] >= total.shape[-1]:  # looking everywhere is then no more work
            indices = torch.arange(total.shape[-1], device=total.device).expand(total.shape)
        weight = take(sent_weight, indices)
        mean = (take(total, indices) / weight).where(weight > 0, 0.0)
        # Added in the same order as W: the difference is zero to the bit where all workers sent.
        everyone = kernels.sum_dense_in_rank_order(torch.ones_like(weights).unsqueeze(-1), weights)
        return cls(total, indices, mean, everyone - weight)


def mean_of_senders(summed: OfSenders) -> Tensor:
    """m, dense (J,): the weighted mean over the workers that sent an entry, zero where nobody did."""
    return torch.zeros_like(summed.total).scatter_(-1, summed.indices, summed.mean)


def impute_(residual: Tensor, sent: SparseGradient, summed: OfSenders, rho: float | Tensor) -> Tensor:
    """The aggregate S + rho (1 - W) m; who did not send an entry takes rho m out of its residual.

    sum_n w_n e_n falls by what the aggregate grows: a worker pays the very number that the aggregate gets,
    times its weight. Work and memory are O(N k) a worker.

    Args:
        residual: (..., J), changed in place.
        sent: what this worker sent.
        summed: what the cluster made of it; its total becomes the aggregate.
        rho: what a worker that did not send an entry is taken to hold, in units of m.
    """
    pays = rho * summed.mean
    kept = read_at(residual, sent)
    at = summed.indices.expand(*residual.shape[:-1], summed.indices.shape[-1])
    residual.scatter_(-1, at, take(residual, summed.indices) - pays)
    write_at_(residual, sent, kept)  # senders pay nothing: they keep what they had, to the bit
    grown = take(summed.total, summed.indices) + summed.missing * pays
    # It is written where it was summed: what was known of where the total is not zero stays true.
    with _unsafe_preserve_version_counter(summed.total):
        return summed.total.scatter_(-1, summed.indices, grown)
