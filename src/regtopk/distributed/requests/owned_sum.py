"""Sums that come back in part: messages to the owners of entries, and what these send back to all."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regtopk import kernels
from regtopk.core.codes import longest_message_bytes
from regtopk.core.owners import entries_of
from regtopk.core.requests import FromOwners, ToOwners
from regtopk.core.sparse import SparseGradient
from regtopk.distributed.requests.gather import gather_sparse
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.wire import decode_rows, encode


def to_owners(rank: Rank, request: ToOwners) -> Tensor:
    """sum_n w_n x_n on the entries that this rank owns, (L,), added in rank order from zero.

    After a bad message the sum is NaN, so what comes back of it is refused by all ranks.
    """
    sparse, counts = request.sparse, [0] * rank.num_workers
    messages = [torch.empty(0, dtype=torch.uint8, device=sparse.values.device)] * rank.num_workers
    with rank.timer.phase("encode_s"):
        for n, row in zip(rank.active, () if rank.is_idle else _rows(sparse), strict=False):
            messages[n], counts[n] = encode(row, rank.index_code), row.indices.shape[-1]
    with rank.timer.phase("collective_s"):
        limits = longest_message_bytes(sparse.numel), sparse.numel
        received, found = rank.collectives.all_to_all_counted(messages, counts, limits)
    rank.count_all_to_all(messages, received)
    rank.record.num_entries += sum(counts)
    total = sparse.values.new_zeros(sparse.numel)
    if rank.is_idle:
        return total
    with rank.timer.phase("decode_s"):
        rows = pad_sequence([received[n] for n in rank.active], batch_first=True)
        codes = rank.index_code, sparse.code, sparse.values.dtype
        pieces, status = decode_rows(rows, sparse.numel, max(found), *codes)
        weighted = rank.of_active(rank.weights_like(total)).unsqueeze(-1) * pieces.values
        kernels.sum_sparse_in_rank_order(pieces.indices, weighted, sparse.numel, out=total)
        rank.check_after_answer(status)
        return total.masked_fill_((status != 0).any(), torch.nan)


def _rows(sparse: SparseGradient) -> Iterator[SparseGradient]:
    """The message for each owner, without padding."""
    for indices, values, count in zip(sparse.indices, sparse.values, sparse.counts.tolist(), strict=True):
        yield replace(sparse, indices=indices[:count], values=values[:count], count=None)


def from_owners(rank: Rank, request: FromOwners, sums: SumBuffer) -> Tensor:
    """What all owners send back of their entries, as one vector, (J,)."""
    (rows,) = gather_sparse(rank, [request.sparse])
    rank.release_withheld()
    with rank.timer.phase("decode_s"):
        owners = torch.arange(len(rank.active), device=rows.indices.device).unsqueeze(-1)
        places, values, counts = map(rank.of_active, (rows.indices, rows.values, rows.counts))
        # the empty place of an owner that has one entry less is zero, wherever it is added
        indices = entries_of(owners, places, len(rank.active)).clamp(max=request.numel - 1)
        total = sums.zeros_for(SparseGradient(indices, values, request.numel))
        kernels.add_in_rank_order_(total, indices, values, torch.ones_like(values[:, 0]))
        sums.keep(total, indices, counts)
        return total
