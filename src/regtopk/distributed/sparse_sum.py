"""A sparse sum: everybody's messages by all_gather, or split by index region, whichever moves fewer bytes."""

from torch import Tensor

from regtopk import kernels
from regtopk.core.requests import SenderSum, SparseSum
from regtopk.core.senders import OfSenders
from regtopk.distributed.gather import gather_sparse
from regtopk.distributed.rank import Rank
from regtopk.distributed.split import split_moves_less, split_sum


def sparse_sum(rank: Rank, request: SparseSum) -> Tensor | OfSenders:
    """sum_n w_n x_n, dense (J,), the same bits on every rank; with what its senders are if asked."""
    splits = rank.collective == "split"
    if rank.collective == "auto":
        splits = split_moves_less(rank, request)
    if splits:
        return split_sum(rank, request)
    sparse, numbers = request.sparse, request.numbers if isinstance(request, SenderSum) else None
    rows, everyones = gather_sparse(rank, sparse, numbers)
    rank.count_entries(sparse)
    with rank.timer.phase("decode_s"):
        indices, values = rows.without_padding()
        weights = rank.weights_like(values)
        weighted = weights.unsqueeze(-1) * values
        total = kernels.sum_sparse_in_rank_order(indices, weighted, sparse.numel, out=rank.zeros_for(sparse))
        rank.keep_total(total, rows.indices, rows.counts)
        if not isinstance(request, SenderSum):
            return total
        weight_of_each = rows.weight_of_each(weights.unsqueeze(-1))
        sent_weight = kernels.sum_sparse_in_rank_order(indices, weight_of_each, sparse.numel)
        added = None if everyones is None else kernels.sum_dense_in_rank_order(everyones, weights)
        return OfSenders.of(total, sent_weight, indices.flatten(), weights, added)
