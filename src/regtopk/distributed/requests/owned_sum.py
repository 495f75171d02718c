"""Sums that come back in part: messages to the owners of entries, and what these send back to all."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import longest_message_bytes
from regtopk.core.owners import entries_of
from regtopk.core.requests import FromOwners, ToOwners
from regtopk.core.sparse import SparseGradient
from regtopk.distributed.requests.gather import gather_sparse
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.distributed.transport import told
from regtopk.wire import decode_rows, encode_rows


def to_owners(rank: Rank, asked: Sequence[tuple[ToOwners, SumBuffer]]) -> list[Tensor]:
    """sum_n w_n x_n of each on the entries that this rank owns, (L,), added in rank order from zero.

    All messages for an owner travel together. After a bad one the sum is NaN, so what comes back of it is
    refused by all ranks.
    """
    vectors = [request.sparse for request, _ in asked]
    with rank.timer.phase("encode_s"):
        sent = [_messages(rank, sparse) for sparse in vectors]
    with rank.timer.phase("collective_s"):
        received = told.exchange(rank.collectives, sent)
    for own, theirs in zip(sent, received, strict=True):
        rank.count_all_to_all([message.numel() for message in own.messages], theirs.sizes)
        rank.record.num_entries += sum(own.counts)
    with rank.timer.phase("decode_s"):
        return [_sum(rank, sparse, found) for sparse, found in zip(vectors, received, strict=True)]


def _messages(rank: Rank, sparse: SparseGradient) -> told.Sent:
    """A message for each rank, and how many entries it holds; nothing for and from ranks of weight zero."""
    messages = [torch.empty(0, dtype=torch.uint8, device=sparse.values.device)] * rank.num_workers
    counts = [0] * rank.num_workers
    if not rank.is_idle:
        joined, sizes = encode_rows(sparse, rank.index_code)
        sizes, num_entries = torch.stack([sizes, sparse.counts]).tolist()
        for n, message, count in zip(rank.active, joined.split(sizes), num_entries, strict=True):
            messages[n], counts[n] = message, count
    return told.Sent(messages, counts, (longest_message_bytes(sparse.numel), sparse.numel))


def _sum(rank: Rank, sparse: SparseGradient, received: told.Received) -> Tensor:
    """The sum of the messages of all ranks, (L,); zeros on a rank of weight zero."""
    total = sparse.values.new_zeros(sparse.numel)
    if rank.is_idle:
        return total
    codes = rank.index_code, sparse.code, sparse.values.dtype
    rows, most = rank.of_active(received.rows), max(received.counts)
    pieces, status = decode_rows(rows, sparse.numel, most, *codes)
    weighted = rank.of_active(rank.weights_like(total)).unsqueeze(-1) * pieces.values
    kernels.sum_sparse_in_rank_order(pieces.indices, weighted, sparse.numel, out=total)
    rank.check_after_answer(status)
    return total.masked_fill_((status != 0).any(), torch.nan)


def from_owners(rank: Rank, asked: Sequence[tuple[FromOwners, SumBuffer]]) -> list[Tensor]:
    """What all owners send back of their entries, each as one vector, (J,)."""
    gathered = gather_sparse(rank, [request.sparse for request, _ in asked])
    rank.release_withheld()
    with rank.timer.phase("decode_s"):
        return [
            _whole(rank, rows, request.numel, sums)
            for (request, sums), rows in zip(asked, gathered, strict=True)
        ]


def _whole(rank: Rank, rows: SparseGradient, numel: int, sums: SumBuffer) -> Tensor:
    """Every owner's entries, (N, m), as one vector, (J,)."""
    owners = torch.arange(len(rank.active), device=rows.indices.device).unsqueeze(-1)
    places, values, counts = map(rank.of_active, (rows.indices, rows.values, rows.counts))
    indices = entries_of(owners, places, len(rank.active))
    values = values.where(indices < numel, 0)  # an owner that has one entry less has an empty place
    indices = indices.clamp(max=numel - 1)
    total = sums.zeros_for(SparseGradient(indices, values, numel))
    kernels.add_in_rank_order_(total, indices, values, torch.ones_like(values[:, 0]))
    sums.keep(total, indices, counts)
    return total
