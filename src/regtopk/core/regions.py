"""Who sums which part of a dense vector, and what that moves: the same in the simulator and on a cluster."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from regtopk.core.blocks import BLOCK
from regtopk.core.codes import segment_bytes


def dense_regions(numel: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """One region (start, end) a worker: whole blocks, as even as can be; none for weight zero."""
    num_active = sum(weight > 0 for weight in weights)
    num_blocks = -(-numel // BLOCK)
    regions, start, owner = [], 0, 0
    for weight in weights:
        owner += weight > 0
        end = min(numel, num_blocks * owner // num_active * BLOCK)
        regions.append((start, end))
        start = end
    return regions


class Moved(NamedTuple):
    """Bytes a worker, all tuples N long."""

    payload: tuple[int, ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]


@lru_cache(maxsize=1024)
def dense_sum_bytes(
    numel: int, weights: tuple[float, ...], dtype: torch.dtype, code: str, sum_code: str
) -> Moved:
    """What a `DenseSum` moves: segments to the owners of the regions, then a ring all_gather of the sums."""
    num_workers = len(weights)
    sizes = [end - start for start, end in dense_regions(numel, weights)]
    part = [segment_bytes(size, dtype=dtype, value_code=code) if size else 0 for size in sizes]
    sums = [segment_bytes(size, dtype=dtype, value_code=sum_code) if size else 0 for size in sizes]
    num_senders = sum(weight > 0 for weight in weights)
    payload, sent, received = [], [], []
    for rank, weight in enumerate(weights):
        is_active = weight > 0
        payload.append(sum(part) * is_active)
        sent.append((sum(part) - part[rank]) * is_active + sum(sums) - sums[(rank + 1) % num_workers])
        received.append(part[rank] * (num_senders - 1) + sum(sums) - sums[rank])
    return Moved(tuple(payload), tuple(sent), tuple(received))
