"""A dense sum: coded segments to the owner of each region, who sums in rank order, and the sums to all."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.codes import is_lossless, quantise
from regtopk.core.regions import dense_regions
from regtopk.core.requests import DenseSum
from regtopk.distributed.collectives import ring_gather
from regtopk.wire import decode_segment, encode_segment, raise_for_status

if TYPE_CHECKING:
    from regtopk.distributed.driver import ProcessGroupDriver


def dense_sum(driver: "ProcessGroupDriver", request: DenseSum) -> Tensor:
    """sum_n w_n x_n: coded segments to the owner of each region, who sums, and the sums to all."""
    x, code = request.tensor, request.code
    if is_lossless(code) and is_lossless(request.sum_code) and not driver.deterministic:
        return _all_reduced(driver, request)
    sum_dtype = request.weight.dtype
    x = x.to(sum_dtype)
    if request.loss is not None:
        request.loss.zero_()
    bounds = dense_regions(x.numel(), driver.weights.tolist())
    with driver.watch.phase("encode_s"):
        empty = torch.empty(0, dtype=torch.uint8, device=x.device)
        parts = [
            empty if driver.is_idle or start == end else encode_segment(x[start:end], code)
            for start, end in bounds
        ]
    with driver.watch.phase("collective_s"):
        received = driver.collectives.all_to_all(parts)
    start, end = bounds[driver.rank]
    own = _sum_region(driver, received, end - start, code, sum_dtype, request, start)
    return _gather_regions(driver, own, bounds, parts, received, request.sum_code)


def _sum_region(
    driver: "ProcessGroupDriver",
    received: list[Tensor],
    size: int,
    code: str,
    dtype: torch.dtype,
    request: DenseSum,
    start: int,
) -> Tensor:
    """This rank's region: sum in rank order, and code the sum; the loss goes where it was asked for."""
    with driver.watch.phase("decode_s"):
        if size == 0:
            return torch.empty(0, dtype=dtype, device=request.tensor.device)
        messages = torch.stack([received[rank] for rank in driver.active])
        rows, status = decode_segment(messages, size, code, dtype)
        raise_for_status(status)
        total = kernels.sum_dense_in_rank_order(rows, driver.weights[driver.active].to(rows))
        if request.loss is None:
            return total
        coded = quantise(total, request.sum_code)
        request.loss[start : start + size] = (total - coded) / request.weight
        return coded


def _gather_regions(
    driver: "ProcessGroupDriver",
    own: Tensor,
    bounds: list[tuple[int, int]],
    parts: list[Tensor],
    received: list[Tensor],
    sum_code: str,
) -> Tensor:
    with driver.watch.phase("encode_s"):
        message = encode_segment(own, sum_code) if own.numel() else own.new_empty(0, dtype=torch.uint8)
    with driver.watch.phase("collective_s"):
        messages, sizes = driver.collectives.all_gather_ragged(message)
    with driver.watch.phase("decode_s"):
        regions = []
        for rank, (start, end) in enumerate(bounds):
            if start == end:
                continue
            values, status = decode_segment(messages[rank, : sizes[rank]], end - start, sum_code, own.dtype)
            raise_for_status(status)
            regions.append(values)
    payload = sum(part.numel() for part in parts)
    sent, got = ring_gather(sizes, driver.rank)
    sent += payload - parts[driver.rank].numel()
    got += sum(part.numel() for part in received) - received[driver.rank].numel()
    driver.count(payload, sent, got)
    driver.record.num_entries += 0 if driver.is_idle else bounds[-1][1]
    return torch.cat(regions) if regions else own


def _all_reduced(driver: "ProcessGroupDriver", request: DenseSum) -> Tensor:
    x = request.tensor.to(request.weight.dtype)
    with driver.watch.phase("collective_s"):
        total = driver.collectives.all_reduce(x * request.weight)
    payload = x.numel() * x.element_size()
    moved = 2 * (driver.num_workers - 1) * payload // driver.num_workers
    driver.count(payload, moved, moved)
    driver.record.num_entries += x.numel()
    return total
