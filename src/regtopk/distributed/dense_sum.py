"""A dense sum: coded segments to the owner of each region, who sums in rank order, and the sums to all."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import is_lossless, quantise, segment_bytes
from regtopk.core.regions import dense_regions
from regtopk.core.requests import DenseSum
from regtopk.core.traffic import all_reduce_bytes
from regtopk.wire import decode_segment, encode_segment, raise_for_status

if TYPE_CHECKING:
    from regtopk.distributed.driver import ProcessGroupDriver

Region = tuple[int, int]


def dense_sum(driver: "ProcessGroupDriver", request: DenseSum) -> Tensor:
    """sum_n w_n x_n, (m,), the same bits on every rank. All sizes are known, so only values travel."""
    if is_lossless(request.code) and is_lossless(request.sum_code) and not driver.deterministic:
        return _all_reduced(driver, request)
    x = request.tensor.to(request.weight.dtype)
    regions = dense_regions(x.numel(), driver.weights.tolist())
    region = regions[driver.rank]
    if driver.is_idle:
        x = x[:0]
    with driver.watch.phase("encode_s"):
        parts = [_encoded(x[start:end], request.code) for start, end in regions]
    with driver.watch.phase("collective_s"):
        own_size = _segment_size(region, x.dtype, request.code)
        sizes = [own_size if rank in driver.active else 0 for rank in range(driver.num_workers)]
        received = driver.collectives.all_to_all(parts, sizes)
    with driver.watch.phase("decode_s"):
        sums, status = _sum_region(driver, received, region, request)
    _count_segments(driver, parts, received)
    driver.record.num_entries += x.numel()
    return _gather_regions(driver, sums, status, regions, request.sum_code)


def _sum_region(
    driver: "ProcessGroupDriver", received: list[Tensor], region: Region, request: DenseSum
) -> tuple[Tensor, Tensor]:
    """This rank's region: sum in rank order, and code the sum; the loss goes where it was asked for.

    Also what is wrong with each rank's segment, (N,). The sum is then NaN, which every rank refuses: to raise
    here, before the sums are gathered, would leave the others waiting for this rank.
    """
    start, end = region
    dtype = request.weight.dtype
    if request.loss is not None:
        request.loss.zero_()
    if start == end:
        nothing = torch.empty(0, dtype=dtype, device=request.tensor.device)
        return nothing, nothing.new_zeros(driver.num_workers, dtype=torch.int64)
    messages = torch.stack([received[rank] for rank in driver.active])
    rows, status = decode_segment(messages, end - start, request.code, dtype)
    total = sums = kernels.sum_dense_in_rank_order(rows, driver.weights[driver.active].to(rows))
    if request.loss is not None:
        sums = quantise(total, request.sum_code)
        request.loss[start:end] = (total - sums) / request.weight
    return sums.masked_fill((status != 0).any(), torch.nan), driver.by_rank(status)


def _gather_regions(
    driver: "ProcessGroupDriver", own: Tensor, own_status: Tensor, regions: list[Region], sum_code: str
) -> Tensor:
    """Every owner's sums, one after another, on every rank."""
    sizes = [_segment_size(region, own.dtype, sum_code) for region in regions]
    with driver.watch.phase("encode_s"):
        message = _encoded(own, sum_code)
    with driver.watch.phase("collective_s"):
        messages = driver.collectives.all_gather_padded(message, max(sizes))
    driver.count_gather(0, sizes)
    with driver.watch.phase("decode_s"):
        total = own.new_empty(regions[-1][1])
        status = torch.zeros(driver.num_workers, dtype=torch.int64, device=own.device)
        for rank, (start, end) in enumerate(regions):
            if end > start:
                message = messages[rank, : sizes[rank]]
                total[start:end], status[rank] = decode_segment(message, end - start, sum_code, own.dtype)
        raise_for_status(own_status)  # the cause, where it is known
        raise_for_status(status)
        return total


def _encoded(values: Tensor, code: str) -> Tensor:
    """A segment's message; none for no values."""
    return encode_segment(values, code) if values.numel() else values.new_empty(0, dtype=torch.uint8)


def _segment_size(region: Region, dtype: torch.dtype, code: str) -> int:
    size = region[1] - region[0]
    return segment_bytes(size, dtype=dtype, value_code=code) if size else 0


def _count_segments(driver: "ProcessGroupDriver", parts: list[Tensor], received: list[Tensor]) -> None:
    payload = sum(part.numel() for part in parts)
    sent = payload - parts[driver.rank].numel()
    driver.count(payload, sent, sum(part.numel() for part in received) - received[driver.rank].numel())


def _all_reduced(driver: "ProcessGroupDriver", request: DenseSum) -> Tensor:
    x = request.tensor.to(request.weight.dtype)
    with driver.watch.phase("collective_s"):
        total = driver.collectives.all_reduce(x * request.weight)
    payload = x.numel() * x.element_size()
    moved = all_reduce_bytes(payload, driver.num_workers)
    driver.count(payload, moved, moved)
    driver.record.num_entries += x.numel()
    return total
