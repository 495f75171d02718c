"""Sums that owners make and send to all: of regions of a dense vector, or of entries, and then in part."""

from collections.abc import Sequence

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import is_lossless, longest_message_bytes, quantise
from regtopk.core.owners import entries_of
from regtopk.core.regions import dense_regions, region_bytes
from regtopk.core.requests import DenseSum, FromOwners, ToOwners
from regtopk.core.sparse import SparseGradient
from regtopk.core.traffic import all_reduce_bytes
from regtopk.distributed.requests.gather import gather_sparse
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.distributed.transport import told
from regtopk.wire import decode_rows, decode_segment, encode_rows, encode_segment, raise_for_status


def dense_sum(rank: Rank, request: DenseSum) -> Tensor:
    """sum_n w_n x_n, (m,), the same bits on every rank. All sizes are known, so only values travel."""
    x = request.tensor.to(request.weight.dtype)
    if is_lossless(request.code) and is_lossless(request.sum_code) and not rank.options.deterministic:
        with rank.timer.phase("collective_s"):
            total = rank.collectives.all_reduce(x * request.weight)
        moved = all_reduce_bytes(x.nbytes, rank.num_workers)
        rank.count(x.nbytes, moved, moved)
        rank.record.num_entries += x.numel()
        return total
    regions = dense_regions(x.numel(), rank.weights.tolist())
    region, shape = regions[rank.index], (x.numel(), rank.num_workers, rank.idle, x.dtype)
    sizes, sum_sizes = (region_bytes(*shape, code) for code in (request.code, request.sum_code))
    if rank.is_idle:
        x = x[:0]
    with rank.timer.phase("encode_s"):
        parts = [_encoded(x[start:end], request.code) for start, end in regions]
    with rank.timer.phase("collective_s"):
        expected = [sizes[rank.index] if n in rank.active else 0 for n in range(rank.num_workers)]
        received = rank.collectives.all_to_all(parts, expected)
    with rank.timer.phase("decode_s"):
        sums, status = _sum_region(rank, received, region, request)
    rank.count_all_to_all([part.numel() for part in parts], expected)
    rank.record.num_entries += x.numel()
    with rank.timer.phase("encode_s"):
        message = _encoded(sums, request.sum_code)
    with rank.timer.phase("collective_s"):
        messages = rank.collectives.all_gather_padded(message, max(sum_sizes))
    rank.count_gather(0, sum_sizes)
    with rank.timer.phase("decode_s"):
        total, statuses = sums.new_empty(regions[-1][1]), torch.zeros_like(status)
        for n, (start, end) in enumerate(regions):
            if end > start:
                message, code = messages[n, : sum_sizes[n]], request.sum_code
                total[start:end], statuses[n] = decode_segment(message, end - start, code, sums.dtype)
        raise_for_status(torch.stack([status, statuses]), rank.collectives.ranks)  # the cause first
        return total


def _sum_region(
    rank: Rank, received: list[Tensor], region: tuple[int, int], request: DenseSum
) -> tuple[Tensor, Tensor]:
    """This rank's region of the sum, added in rank order, and the status of each rank's segment, (N,).

    What the sum's code will lose goes into `request.loss`. After a bad segment the sum is NaN, which every
    rank refuses: an error here, before the sums are gathered, would leave the others waiting for this rank.
    """
    start, end = region
    dtype = request.weight.dtype
    if request.loss is not None:
        request.loss.zero_()
    if start == end:
        nothing = torch.empty(0, dtype=dtype, device=request.tensor.device)
        return nothing, nothing.new_zeros(rank.num_workers, dtype=torch.int64)
    messages = torch.stack([received[n] for n in rank.active])
    rows, status = decode_segment(messages, end - start, request.code, dtype)
    total = sums = kernels.sum_dense_in_rank_order(rows, rank.weights[rank.active].to(rows))
    if request.loss is not None:
        sums = quantise(total, request.sum_code)
        request.loss[start:end] = (total - sums) / request.weight
    return sums.masked_fill((status != 0).any(), torch.nan), rank.by_rank(status)


def _encoded(values: Tensor, code: str) -> Tensor:
    """A segment's message; none for no values."""
    return encode_segment(values, code) if values.numel() else values.new_empty(0, dtype=torch.uint8)


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
    rank.check_later(status, after_answer=True)
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
