"""Sparse sums: everybody's messages by all_gather, or split by index region, whichever moves fewer bytes."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from regtopk import kernels
from regtopk.core.requests import OfSenders, SenderSum, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.distributed.requests.gather import gather_sparse
from regtopk.distributed.requests.rank import Rank, SumBuffer, Total
from regtopk.distributed.requests.split import split_is_better, split_sum


def sparse_sums(rank: Rank, asked: Sequence[tuple[SparseSum, SumBuffer]]) -> list[Tensor | OfSenders]:
    """sum_n w_n x_n of each, dense (J,), the same bits on every rank; with what its senders are if asked."""
    collective = rank.options.collective
    are_split = [
        split_is_better(rank, request) if collective == "auto" else collective == "split"
        for request, _ in asked
    ]
    whole = [request.sparse for (request, _), is_split in zip(asked, are_split, strict=True) if not is_split]
    gathered = iter(gather_sparse(rank, whole))
    return [
        _split_sum(rank, request, sums) if is_split else _sum(rank, request, sums, next(gathered))
        for (request, sums), is_split in zip(asked, are_split, strict=True)
    ]


def _split_sum(rank: Rank, request: SparseSum, sums: SumBuffer) -> Tensor | OfSenders:
    """The sum of vectors that are split by region; of a batch, (U, 1, m), one after another."""
    sparse = request.sparse
    if sparse.indices.dim() == 1:
        return split_sum(rank, request, sums)
    assert type(request) is SparseSum
    weight, totals = request.weight.view(()), sums.zeros_for(sparse)
    for total, indices, values in zip(totals, sparse.indices[:, 0], sparse.values[:, 0], strict=True):
        row = replace(sparse, indices=indices, values=values)
        found = split_sum(rank, SparseSum(row, weight), SumBuffer())
        assert isinstance(found, Tensor)
        total.copy_(found)
    sums.total = Total(totals, None, totals._version)
    return totals.unsqueeze(1)


def _sum(rank: Rank, request: SparseSum, sums: SumBuffer, rows: SparseGradient) -> Tensor | OfSenders:
    """The sum of everybody's sparse vectors, (N, m); of a batch, (U, N, m), the sums are (U, 1, J)."""
    sparse = request.sparse
    rank.count_entries(sparse)
    with rank.timer.phase("decode_s"):
        indices, values = rows.indices, rows.values  # zeros of entry 0 in padding
        weights, total = rank.weights_like(values), sums.zeros_for(sparse)
        kernels.add_in_rank_order_(total, indices, values, weights)
        sums.keep(total, indices, rows.counts)
        if not isinstance(request, SenderSum):
            return total if total.dim() == 1 else total.unsqueeze(1)
        weight_of_each = rows.weight_of_each(weights.unsqueeze(-1))
        sent_weight = kernels.sum_sparse_in_rank_order(indices, weight_of_each, sparse.numel)
        return OfSenders.of(total, sent_weight, indices.flatten(), weights)
