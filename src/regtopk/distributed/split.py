"""A sparse sum split by index region: O(k) from each rank to the owners, who sum and gather the sums.

Bit for bit the sum that an all_gather of everything gives: every region is added in rank order from zero.
"""

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regtopk.core.blocks import BLOCK
from regtopk.core.sparse import SparseGradient
from regtopk.distributed.collectives import Collectives, ring_gather
from regtopk.wire import decode, encode

if TYPE_CHECKING:
    from regtopk.distributed.driver import ProcessGroupDriver


def split_and_reduce(driver: "ProcessGroupDriver", sparse: SparseGradient) -> Tensor:
    """sum_n w_n x_n, dense (J,), by all_to_all and all_gather."""
    bounds = [sparse.numel * rank // driver.num_workers for rank in range(driver.num_workers + 1)]
    with driver.watch.phase("encode_s"):
        pieces = [] if driver.is_idle else _pieces(sparse, bounds)
        messages = [encode(piece, driver.index_code) for piece, _ in pieces]
        places = [torch.tensor([base, piece.numel]) for piece, base in pieces]
    with driver.watch.phase("collective_s"):
        received, origins = _send(driver.collectives, messages, places, sparse.values.device)
    with driver.watch.phase("decode_s"):
        region = _sum_region(driver, received, origins, sparse, bounds)
    return _gather_sums(driver, region, sparse, bounds, messages, received)


def _pieces(sparse: SparseGradient, bounds: list[int]) -> list[tuple[SparseGradient, int]]:
    """The entries of each region, and the index they count from.

    Pieces are cut at whole blocks of values, since a block shares its scales: a piece may carry a few
    entries of its neighbours, which the receiver leaves out.
    """
    count = sparse.indices.shape[-1] if sparse.count is None else int(sparse.count)
    indices, values = sparse.indices[:count], sparse.values[:count]
    cuts = torch.searchsorted(indices, torch.tensor(bounds, device=indices.device)).tolist()
    pieces = []
    for low, high in pairwise(cuts):
        start, end = low // BLOCK * BLOCK, min(count, -(-high // BLOCK) * BLOCK)
        if low == high:
            start = end = low
        chosen = indices[start:end]
        base = int(chosen[0]) if end > start else 0
        span = int(chosen[-1]) + 1 - base if end > start else 0
        pieces.append((SparseGradient(chosen - base, values[start:end], span, code=sparse.code), base))
    return pieces


def _send(
    collectives: Collectives, messages: list[Tensor], places: list[Tensor], device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Messages and their places to the owners of their regions."""
    if not messages:
        messages = [torch.empty(0, dtype=torch.uint8, device=device)] * collectives.num_workers
        places = [torch.empty(0, dtype=torch.int64)] * collectives.num_workers
    received = collectives.all_to_all(messages)
    origins = collectives.all_to_all([place.to(device) for place in places])
    return received, origins


def _sum_region(
    driver: "ProcessGroupDriver",
    received: list[Tensor],
    origins: list[Tensor],
    sparse: SparseGradient,
    bounds: list[int],
) -> SparseGradient:
    """This rank's region of the sum, in rank order from zero, on the union of the supports."""
    low, high = bounds[driver.rank], bounds[driver.rank + 1]
    total = sparse.values.new_zeros(high - low)
    is_touched = torch.zeros(high - low, dtype=torch.bool, device=total.device)
    weights = driver.weights.to(total)
    for rank, (message, origin) in enumerate(zip(received, origins, strict=True)):
        if message.numel() == 0:
            continue
        base, span = origin.tolist()
        piece = decode(message, span)
        at = piece.indices + (base - low)
        is_ours = (at >= 0) & (at < high - low)
        at, values = at[is_ours], piece.values.to(total.dtype)[is_ours]
        total.scatter_add_(0, at, weights[rank] * values)
        is_touched[at] = True
    indices = is_touched.nonzero().flatten()
    return SparseGradient(indices, total[indices], high - low)


def _gather_sums(
    driver: "ProcessGroupDriver",
    region: SparseGradient,
    sparse: SparseGradient,
    bounds: list[int],
    messages: list[Tensor],
    received: list[Tensor],
) -> Tensor:
    with driver.watch.phase("encode_s"):
        message = encode(region, driver.index_code)
    with driver.watch.phase("collective_s"):
        gathered, sizes = driver.collectives.all_gather_ragged(message)
    with driver.watch.phase("decode_s"):
        total = sparse.values.new_zeros(sparse.numel)
        for rank, size in enumerate(sizes):
            sums = decode(gathered[rank, :size], bounds[rank + 1] - bounds[rank])
            total[sums.indices + bounds[rank]] = sums.values
    payload = sum(m.numel() for m in messages)
    sent, got = ring_gather(sizes, driver.rank)
    sent += payload - (messages[driver.rank].numel() if messages else 0)
    got += sum(m.numel() for m in received) - received[driver.rank].numel()
    driver.count(payload, sent, got)
    driver.record.num_entries += 0 if driver.is_idle else int(sparse.counts)
    return total
