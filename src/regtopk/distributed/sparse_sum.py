"""A sparse sum: everybody's messages by all_gather, or split by index region, whichever moves fewer bytes."""

from torch import Tensor

from regtopk import kernels
from regtopk.core.requests import SparseSum
from regtopk.distributed.gather import gather_sparse
from regtopk.distributed.rank import Rank
from regtopk.distributed.split import split_moves_less, split_sum


def sparse_sum(rank: Rank, request: SparseSum) -> Tensor:
    """sum_n w_n x_n, dense (J,), the same bits on every rank."""
    sparse = request.sparse
    splits = rank.collective == "split"
    if rank.collective == "auto":
        splits = split_moves_less(sparse, rank.index_code, rank.num_workers)
    if splits:
        return split_sum(rank, sparse)
    rows = gather_sparse(rank, sparse)
    rank.count_entries(sparse)
    with rank.timer.phase("decode_s"):
        indices, values = rows.without_padding()
        weighted = rank.weights.to(values).unsqueeze(-1) * values
        return kernels.sum_sparse_in_rank_order(indices, weighted, sparse.numel, out=rank.take_spare(sparse))
