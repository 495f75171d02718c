"""Who sums which part of a vector, and what that moves: in the simulator, on a cluster and in a plan."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from regtopk.core.blocks import BLOCK, NUM_SCALES
from regtopk.core.codes import full_message_bytes, segment_bytes


def dense_regions(numel: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """One region (start, end) per worker: whole blocks, as even as can be; none for weight zero."""
    num_active = sum(weight > 0 for weight in weights)
    num_blocks = -(-numel // BLOCK)
    regions, start, owner = [], 0, 0
    for weight in weights:
        owner += weight > 0
        end = min(numel, num_blocks * owner // num_active * BLOCK)
        regions.append((start, end))
        start = end
    return regions


@lru_cache(maxsize=4096)
def region_bytes(
    numel: int, num_workers: int, idle: tuple[int, ...], dtype: torch.dtype, code: str
) -> tuple[int, ...]:
    """Bytes of a dense vector's part for each worker's region, N long; idle workers own none."""
    weights = [float(rank not in idle) for rank in range(num_workers)]
    lengths = [end - start for start, end in dense_regions(numel, weights)]
    size = {length: segment_bytes(length, dtype=dtype, value_code=code) for length in set(lengths)}
    return tuple(size[length] if length else 0 for length in lengths)


def sender_code(weights: Sequence[float]) -> str:
    """How the owner of a region tells the summed weight of an entry's senders.

    Of equal weights their number tells it. Numbers up to 127 survive "int8", rounded to integers: a level is
    then at most one apart. Otherwise the sum itself travels.
    """
    active = {weight for weight in weights if weight > 0}
    return "int8" if len(active) == 1 and len(weights) <= 127 else "float32"


class Split(NamedTuple):
    """Sizes of a sparse sum that is split by index region."""

    piece_bytes: int  # that a worker sends to the owner of a region
    sums_bytes: int  # that the owner sends to everybody
    message_bytes: int  # that a worker would send to everybody without a split
    union: float  # how many entries the sum has


@lru_cache(maxsize=4096)
def split_of(
    count: int,
    numel: int,
    num_workers: int,
    *,
    dtype: torch.dtype,
    value_code: str,
    index_code: str,
    sender_code: str | None = None,
) -> Split:
    """How large the messages of a split sparse sum are on average, for workers that choose independently.

    The union of their supports is then largest: J (1 - (1 - k/J)^N) entries. Values in blocks share scales,
    so their pieces are cut at whole blocks and count their indices from zero. The sums travel uncoded; the
    ``sender_code`` says how it travels back who sent each entry.
    """

    def size(entries: int, of: int, values: str) -> int:
        return full_message_bytes(entries, of, dtype=dtype, value_code=values, index_code=index_code)

    union = numel * (1 - (1 - count / numel) ** num_workers)
    share, region = math.ceil(count / num_workers), math.ceil(numel / num_workers)
    if value_code in NUM_SCALES:
        piece = size(min(count, share + BLOCK), numel, value_code)
    else:
        piece = size(min(share, region), region, value_code)
    num_sums = math.ceil(union / num_workers)
    sums = size(num_sums, region, "float32")
    if sender_code is not None:
        sums += segment_bytes(num_sums, dtype=dtype, value_code=sender_code)
    return Split(piece, sums, size(count, numel, value_code), union)
