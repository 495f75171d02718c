"""Who sent an entry: what a sparse sum can tell beside the sum, and what follows for those who did not."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from regtopk import kernels
from regtopk.core.exact import exact_sum
from regtopk.core.sparse import SparseGradient, clear_at_, read_at, take, write_at_

_LARGEST_SHARE = 1e6  # of a slope: finite in any dtype, and far above what can mean anything


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
        numbers: sum_n w_n x_n of the few numbers that came along, (m,); None if there were none.
    """

    total: Tensor
    indices: Tensor
    mean: Tensor
    missing: Tensor
    numbers: Tensor | None = None

    @classmethod
    def of(
        cls,
        total: Tensor,
        sent_weight: Tensor,
        indices: Tensor,
        weights: Tensor,
        numbers: Tensor | None = None,
    ) -> "OfSenders":
        """From dense sums.

        Args:
            total: (..., J).
            sent_weight: (..., J), W, added in rank order from zero.
            indices: (..., u), where to look.
            weights: (N,), of all workers.
            numbers: as they are.
        """
        if indices.shape[-1] >= total.shape[-1]:  # looking everywhere is then no more work
            indices = torch.arange(total.shape[-1], device=total.device).expand(total.shape)
        weight = take(sent_weight, indices)
        mean = (take(total, indices) / weight).where(weight > 0, 0.0)
        # Added in the same order as W: the difference is zero to the bit where all workers sent.
        everyone = kernels.sum_dense_in_rank_order(torch.ones_like(weights).unsqueeze(-1), weights)
        return cls(total, indices, mean, everyone - weight, numbers)


def _is_named_last(indices: Tensor, numel: int) -> Tensor:
    """(..., u): True at one of the places where an entry is named, False at the others."""
    place = torch.arange(indices.shape[-1], device=indices.device).expand(indices.shape)
    chosen = indices.new_empty(*indices.shape[:-1], numel).scatter_(-1, indices, place)
    return chosen.gather(-1, indices) == place


def mean_of_senders(summed: OfSenders) -> Tensor:
    """m, dense (J,): the weighted mean over the workers that sent an entry, zero where nobody did."""
    return torch.zeros_like(summed.total).scatter_(-1, summed.indices, summed.mean)


def slope_of_absent(residual: Tensor, sent: SparseGradient, summed: OfSenders) -> Tensor:
    """One worker's share of the slope of what those that did not send an entry hold of it, on m: (..., 1).

    sum_n w_n of the shares is the least-squares slope, sum_n w_n <e_n, m> / sum_n w_n <m, m>, where worker n
    counts at the entries that others sent and it did not.

    Args:
        residual: (..., J), before anything is paid; read, and left as it is.
        sent: what this worker sent.
        summed: what the cluster made of it.
    """
    kept = read_at(residual, sent)
    clear_at_(residual, sent)  # what it still holds of its own entries does not count
    held = take(residual, summed.indices)
    write_at_(residual, sent, kept)
    numel = residual.shape[-1]
    mean = summed.mean.double().where(_is_named_last(summed.indices, numel), 0.0)  # an entry counts once
    product = exact_sum(held * mean, most=numel)
    square = exact_sum(summed.missing * mean * mean, most=numel)
    share = (product / square).where(square > 0, 0.0).clamp(-_LARGEST_SHARE, _LARGEST_SHARE)
    return share.unsqueeze(-1).to(residual.dtype)


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
