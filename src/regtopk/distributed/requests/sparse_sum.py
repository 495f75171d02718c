"""Sparse sums: everybody's messages by all_gather, or split by index region, whichever moves fewer bytes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.blocks import BLOCK, NUM_SCALES
from regtopk.core.codes import longest_message_bytes
from regtopk.core.regions import sender_code, split_of
from regtopk.core.requests import OfSenders, SenderSum, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.traffic import goes_directly
from regtopk.distributed.requests.gather import gather_sparse
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.distributed.transport import told
from regtopk.errors import WireFormatError
from regtopk.wire import decode, decode_segment, encode, encode_segment, raise_for_status


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
    rows = zip(sparse.indices[:, 0], sparse.values[:, 0], strict=True)
    requests = [SparseSum(replace(sparse, indices=at, values=x), request.weight) for at, x in rows]
    totals: list[Any] = [split_sum(rank, each, SumBuffer()) for each in requests]
    return torch.stack(totals).unsqueeze(1)


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


def split_is_better(rank: Rank, request: SparseSum) -> bool:
    """Whether a split by region is computed to take less time than an all_gather, or to bring fewer bytes."""
    sparse = request.sparse
    k = sparse.indices.shape[-1]
    if rank.num_workers < 3 or sparse.count is not None or k == 0:
        return False
    sizes = split_of(
        k,
        sparse.numel,
        rank.num_workers,
        dtype=sparse.values.dtype,
        value_code=sparse.code,
        index_code=rank.index_code,
        sender_code=_sender_code(rank, request),
    )
    link, others = rank.options.link, rank.num_workers - 1
    if link is None:
        return sizes.piece_bytes + sizes.sums_bytes < sizes.message_bytes
    is_on_device = rank.collectives.is_on_device(sparse.values.device)
    is_direct = not is_on_device and goes_directly(sizes.message_bytes, rank.num_workers, link)
    num_hops = 1 if is_direct else others  # a ring passes messages on
    # pieces go to the owners, then sums to all; a GPU's lengths are told before each
    split_s = link.time_s(others * (sizes.piece_bytes + sizes.sums_bytes), 4 if is_on_device else 2)
    return split_s < link.time_s(others * sizes.message_bytes, num_hops)


def split_sum(rank: Rank, request: SparseSum, buffer: SumBuffer) -> Tensor | OfSenders:
    """sum_n w_n x_n, dense (J,), by O(k) from each rank to the owners of regions, who gather their sums.

    Bit for bit the sum that an all_gather of everything gives: every region is added in rank order from zero.
    """
    sparse, code = request.sparse, _sender_code(rank, request)
    bounds = [sparse.numel * n // rank.num_workers for n in range(rank.num_workers + 1)]
    limits, nothing = (longest_message_bytes(sparse.numel), 0), [0] * rank.num_workers
    with rank.timer.phase("encode_s"):
        messages = [rank.encoded(piece) for piece in _pieces(sparse, bounds)]
    with rank.timer.phase("collective_s"):
        (received,) = told.exchange(rank.collectives, [told.Sent(messages, nothing, limits)])
    with rank.timer.phase("decode_s"):
        parts, refused = _sum_region(rank, received.messages, sparse, code, bounds)
    with rank.timer.phase("collective_s"):
        to_all = [told.Sent([part] * rank.num_workers, nothing, limits) for part in parts]  # not round a ring
        gathered = told.exchange(rank.collectives, to_all)
    if refused is not None:
        raise refused
    rank.count_all_to_all([message.numel() for message in messages], received.sizes)
    own = sum(part.numel() for part in parts)
    everyones = sum(sum(part.sizes) for part in gathered)
    rank.count(0, own * (rank.num_workers - 1), everyones - own)
    rank.count_entries(sparse)
    with rank.timer.phase("decode_s"):
        by_rank = list(zip(*(part.messages for part in gathered), strict=True))
        return _joined(rank, by_rank, request, bounds, buffer)


def _sender_code(rank: Rank, request: SparseSum) -> str | None:
    """How the senders of each entry are coded, if they are asked for: by their number or summed weights."""
    return sender_code(rank.weights.tolist()) if isinstance(request, SenderSum) else None


def _pieces(sparse: SparseGradient, bounds: list[int]) -> list[SparseGradient]:
    """The entries of each region, counted from its start.

    Values in blocks share scales, so those pieces are cut at whole blocks and counted from zero: they may
    carry a few entries of their neighbours, which the receiver leaves out.
    """
    count = sparse.indices.shape[-1] if sparse.count is None else int(sparse.count)
    indices, values = sparse.indices[:count], sparse.values[:count]
    cuts = torch.searchsorted(indices, torch.tensor(bounds, device=indices.device)).tolist()
    pieces = []
    for (low, high), (start, end) in zip(pairwise(cuts), pairwise(bounds), strict=True):
        numel = end - start
        if sparse.code in NUM_SCALES:
            start, numel = 0, sparse.numel
            if high > low:
                low, high = low // BLOCK * BLOCK, min(count, -(-high // BLOCK) * BLOCK)
        pieces.append(SparseGradient(indices[low:high] - start, values[low:high], numel, code=sparse.code))
    return pieces


def _sum_region(
    rank: Rank, received: list[Tensor], sparse: SparseGradient, code: str | None, bounds: list[int]
) -> tuple[list[Tensor], WireFormatError | None]:
    """This rank's region of the sum, in rank order from zero, and the senders of each entry: as messages.

    After a bad piece the sum is NaN, which every rank refuses: to raise here would leave the others waiting.
    """
    low, high = bounds[rank.index], bounds[rank.index + 1]
    start, numel = (low, sparse.numel) if sparse.code in NUM_SCALES else (0, high - low)
    total = sparse.values.new_zeros(high - low)
    senders, is_touched = torch.zeros_like(total), torch.zeros_like(total, dtype=torch.bool)
    weights, refused = rank.weights.to(total), None
    for n, message in enumerate(received):
        if message.numel() == 0:
            continue
        try:
            piece = decode(message, numel)
        except WireFormatError as error:
            refused = WireFormatError(f"rank {rank.collectives.ranks[n]}: {error}")
            total.fill_(torch.nan)
            is_touched.fill_(True)
            break
        at = piece.indices - start
        is_ours = (at >= 0) & (at < high - low)
        at, values = at[is_ours], piece.values.to(total.dtype)[is_ours]
        total.scatter_add_(0, at, weights[n] * values)
        is_touched[at] = True
        senders[at] += 1 if code == "int8" else weights[n]
    indices = is_touched.nonzero().flatten()
    with rank.timer.phase("encode_s"):
        parts = [encode(SparseGradient(indices, total[indices], high - low), rank.index_code)]
        if code is not None:
            parts.append(encode_segment(senders[indices], code))
    return parts, refused


def _joined(
    rank: Rank,
    gathered: Sequence[tuple[Tensor, ...]],
    request: SparseSum,
    bounds: list[int],
    buffer: SumBuffer,
) -> Tensor | OfSenders:
    """The regions' sums as one vector, and what is to say of its senders."""
    total, code = buffer.zeros_for(request.sparse), _sender_code(rank, request)
    everywhere = []
    for n, (message, *_) in enumerate(gathered):
        region = decode(message, bounds[n + 1] - bounds[n])
        everywhere.append(region.indices + bounds[n])
        total[everywhere[n]] = region.values
    indices = torch.cat(everywhere)
    buffer.keep(total, indices.unsqueeze(0), indices.new_full((1,), indices.numel()))
    if code is None:
        return total
    found = [
        decode_segment(message, at.numel(), code, total.dtype)
        for (_, message), at in zip(gathered, everywhere, strict=True)
    ]
    raise_for_status(torch.stack([status for _, status in found]), rank.collectives.ranks)
    senders = torch.cat([senders for senders, _ in found])
    if code == "int8":  # how many they are: their weights, which are equal, are added one by one
        weight = rank.weights.max().to(senders.dtype)
        sums = accumulate([weight] * len(rank.active), initial=torch.zeros_like(weight))
        senders = torch.stack([*sums]).to(senders.device)[senders.round().long()]
    sent_weight = torch.zeros_like(total).index_copy_(0, indices, senders)
    return OfSenders.of(total, sent_weight, indices, rank.weights.to(total))
