"""A sparse sum split by index region: O(k) from each rank to the owners, who sum and gather the sums.

Bit for bit the sum that an all_gather of everything gives: every region is added in rank order from zero.
"""

from itertools import pairwise

import torch
from torch import Tensor

from regtopk.core.blocks import BLOCK, NUM_SCALES
from regtopk.core.codes import longest_message_bytes
from regtopk.core.regions import split_of
from regtopk.core.sparse import SparseGradient
from regtopk.distributed.rank import Rank
from regtopk.errors import WireFormatError
from regtopk.wire import decode, encode


def split_moves_less(sparse: SparseGradient, index_code: str, num_workers: int) -> bool:
    """Whether a split by region is computed to move fewer bytes than an all_gather of everything.

    all_gather receives N - 1 messages of k entries. The split receives N - 1 messages of about k / N, and
    then N - 1 regions of the sum on the union of the supports, which is largest, J (1 - (1 - k/J)^N)
    entries, when the workers choose independently.
    """
    numel, k = sparse.numel, sparse.indices.shape[-1]
    if num_workers < 3 or sparse.count is not None or k == 0:
        return False
    sizes = split_of(
        k, numel, num_workers, dtype=sparse.values.dtype, value_code=sparse.code, index_code=index_code
    )
    return sizes.piece_bytes + sizes.sums_bytes < sizes.message_bytes


def split_sum(rank: Rank, sparse: SparseGradient) -> Tensor:
    """sum_n w_n x_n, dense (J,), by all_to_all and all_gather."""
    bounds = [sparse.numel * n // rank.num_workers for n in range(rank.num_workers + 1)]
    longest = longest_message_bytes(sparse.numel)
    with rank.timer.phase("encode_s"):
        messages = [rank.encoded(piece) for piece in _pieces(sparse, bounds)]
    with rank.timer.phase("collective_s"):
        received = rank.collectives.all_to_all_ragged(messages, longest)
    with rank.timer.phase("decode_s"):
        region, refused = _sum_region(rank, received, sparse, bounds)
    with rank.timer.phase("encode_s"):
        message = encode(region, rank.index_code)
    with rank.timer.phase("collective_s"):
        gathered = rank.collectives.all_gather_ragged(message, longest)
    if refused is not None:
        raise refused
    with rank.timer.phase("decode_s"):
        spare = rank.take_spare(sparse)
        total = sparse.values.new_zeros(sparse.numel) if spare is None else spare.zero_()
        for n, theirs in enumerate(gathered):
            sums = decode(theirs, bounds[n + 1] - bounds[n])
            total[sums.indices + bounds[n]] = sums.values
    rank.count_all_to_all(messages, received)
    own, others = message.numel(), rank.num_workers - 1
    rank.count(0, own * others, sum(theirs.numel() for theirs in gathered) - own)
    rank.count_entries(sparse)
    return total


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
    rank: Rank, received: list[Tensor], sparse: SparseGradient, bounds: list[int]
) -> tuple[SparseGradient, WireFormatError | None]:
    """This rank's region of the sum, in rank order from zero, on the union of the supports.

    Also the error of a bad piece. The sum is then NaN, which every rank refuses: to raise here, before the
    sums are gathered, would leave the others waiting for this rank.
    """
    low, high = bounds[rank.index], bounds[rank.index + 1]
    start, numel = (low, sparse.numel) if sparse.code in NUM_SCALES else (0, high - low)
    total = sparse.values.new_zeros(high - low)
    is_touched = torch.zeros(high - low, dtype=torch.bool, device=total.device)
    weights, refused = rank.weights.to(total), None
    for n, message in enumerate(received):
        if message.numel() == 0:
            continue
        try:
            piece = decode(message, numel)
        except WireFormatError as error:
            refused = WireFormatError(f"rank {n}: {error}")
            total.fill_(torch.nan)
            is_touched.fill_(True)
            break
        at = piece.indices - start
        is_ours = (at >= 0) & (at < high - low)
        at, values = at[is_ours], piece.values.to(total.dtype)[is_ours]
        total.scatter_add_(0, at, weights[n] * values)
        is_touched[at] = True
    indices = is_touched.nonzero().flatten()
    return SparseGradient(indices, total[indices], high - low), refused
