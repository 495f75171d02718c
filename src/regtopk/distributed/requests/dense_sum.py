"""A dense sum: coded segments to the owner of each region, who sums in rank order, and the sums to all."""

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import is_lossless, quantise
from regtopk.core.regions import dense_regions, region_bytes
from regtopk.core.requests import DenseSum
from regtopk.core.traffic import all_reduce_bytes
from regtopk.distributed.requests.rank import Rank
from regtopk.wire import decode_segment, encode_segment, raise_for_status

Region = tuple[int, int]


def dense_sum(rank: Rank, request: DenseSum) -> Tensor:
    """sum_n w_n x_n, (m,), the same bits on every rank. All sizes are known, so only values travel."""
    if is_lossless(request.code) and is_lossless(request.sum_code) and not rank.options.deterministic:
        return _all_reduced(rank, request)
    x = request.tensor.to(request.weight.dtype)
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
    rank: Rank, received: list[Tensor], region: Region, request: DenseSum
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


def _all_reduced(rank: Rank, request: DenseSum) -> Tensor:
    x = request.tensor.to(request.weight.dtype)
    with rank.timer.phase("collective_s"):
        total = rank.collectives.all_reduce(x * request.weight)
    payload = x.numel() * x.element_size()
    moved = all_reduce_bytes(payload, rank.num_workers)
    rank.count(payload, moved, moved)
    rank.record.num_entries += x.numel()
    return total
