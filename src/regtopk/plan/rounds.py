"""What a method asks of the cluster in a step: its requests, the sizes of their messages, and the work.

Sizes are the library's own formulas (`core.codes`), so where a message's size depends on J and k alone they
are those of the real messages; tests/plan/test_rounds.py holds every algorithm to that.
"""

from collections import Counter
from dataclasses import fields
from functools import lru_cache
from itertools import pairwise
from math import ceil, log2
from typing import Literal, NamedTuple

import torch

from regtopk.algorithms import ALGORITHMS
from regtopk.core.blocks import BLOCK, NUM_SCALES
from regtopk.core.codes import full_message_bytes, segment_bytes

Collective = Literal["all_reduce", "all_gather", "split"]
Kind = Literal["sparse", "dense", "index_gather", "gather", "index_broadcast"]

# These algorithms find how many entries they send: the ranks tell one another their sizes first. For those
# without a density the plan's density is what their thresholds are assumed to let through.
RAGGED = {"mipd", "strom", "dryden", "gradient-dropping", "adacomp", "hard-threshold", "sidco", "atomo"}
SENT_CODES = {
    "strom": "sign",
    "dryden": "sign",
    "adacomp": "sign",
    "atomo": "float32",
    "atomo-svd": "float32",
}
SKETCH_CELLS = 20  # for each entry: 5 rows of 4 k
CANDIDATES = 16  # for each entry
SMALL = 2**31 - 1  # indices below travel as int32 where they travel uncoded

_DTYPE = torch.float32
_INDEX_CODE = "elias-fano"
_BYTES_PER_DECODED_ENTRY = 64  # by how much the peak of a sum of N messages of k entries grows with N k


class Asked(NamedTuple):
    """One request: `num_entries` entries of a vector of `numel`, values in a code."""

    kind: Kind
    num_entries: int
    numel: int
    code: str = "float32"
    is_ragged: bool = False


class Move(NamedTuple):
    """One collective on a worker's interface.

    Args:
        kind: of collective, as it is calibrated.
        num_messages: that a worker sends one after another.
        num_hops: that must follow one another on the way of the last byte.
        sent_bytes: through the interface (as many are received at the same time).
    """

    kind: str
    num_messages: int
    num_hops: int
    sent_bytes: float


class Work(NamedTuple):
    """Local work: the calibrated line it lies on, and how much of each of its units."""

    line: str
    units: dict[str, float]


def value_codes_of(name: str, codes: tuple[str, ...]) -> tuple[str, ...]:
    """The value codes that an algorithm can be planned with."""
    takes_code = any(f.name == "value_code" for f in fields(ALGORITHMS[name]))
    return codes if takes_code or name == "adaptive" else (SENT_CODES[name],)


def requests_of(name: str, numel: int, k: int, num_workers: int, code: str) -> list[Asked]:
    """What an algorithm of the table asks for in a step, in order."""
    if name == "dense":
        return [Asked("dense", numel, numel, code)]
    on_support = Asked("dense", k, k, code)
    if name == "randomk":
        return [on_support]
    if name == "consensus":
        return [Asked("index_gather", -(-k // num_workers), numel, "none"), on_support]
    if name == "scalecom":
        return [Asked("index_broadcast", k, numel, "none"), on_support]
    if name == "fair-topk":
        return [Asked("gather", k * (4 if numel <= SMALL else 8), numel), on_support]
    if name == "sketch":
        return [Asked("dense", SKETCH_CELLS * k, SKETCH_CELLS * k), on_support]
    if name == "random-candidates":
        return [Asked("sparse", k, min(numel, CANDIDATES * k), code)]
    if name == "atomo-svd":
        return [Asked("gather", 4 * k, numel)]
    if name == "chunked-topk":
        return [Asked("sparse", _chunked(numel, k), numel, code)]
    return [Asked("sparse", k, numel, code, name in RAGGED)]


def _chunked(numel: int, k: int) -> int:
    """Entries that chunked Top-k sends: as many from every chunk of about 4,096."""
    chunk = ceil(numel / ceil(numel / 4096))
    per_chunk = max(1, round(k * chunk / numel))
    whole, rest = divmod(numel, chunk)
    return whole * per_chunk + min(per_chunk, rest)


def payload_bytes(asked: Asked, num_workers: int, collective: Collective) -> int:
    """Bytes of the messages one worker contributes."""
    if asked.kind == "gather":
        return asked.num_entries
    if asked.kind == "dense":
        return _segments(asked.num_entries, num_workers, asked.code).total
    if asked.kind == "sparse" and collective == "split":
        return num_workers * _piece_bytes(asked, num_workers)
    return _message_bytes(asked.num_entries, asked.numel, asked.code)


def moves_of(asked: Asked, num_workers: int, collective: Collective) -> list[Move]:
    """The collectives that answer a request, as `distributed.driver` runs them."""
    N = num_workers
    if asked.kind == "index_broadcast":
        return [broadcast(_message_bytes(asked.num_entries, asked.numel, asked.code), N)]
    if asked.kind == "gather":
        return [all_gather(16, N), all_gather(asked.num_entries, N)]
    if asked.kind == "dense":
        own, sums = (_segments(asked.num_entries, N, code).largest for code in (asked.code, "float32"))
        return [all_to_all(own, N), all_gather(sums, N)]
    if asked.kind == "sparse" and collective == "split":
        sums = _message_bytes(ceil(union(asked, N) / N), ceil(asked.numel / N), "float32")
        pieces = all_to_all(_piece_bytes(asked, N), N)
        return [all_gather(8 * N, N), pieces, all_gather(8, N), all_to_all(sums, N)]
    message = all_gather(_message_bytes(asked.num_entries, asked.numel, asked.code), N)
    return [all_gather(16, N), message] if asked.is_ragged else [message]


def work_of(asked: Asked, num_workers: int, collective: Collective) -> list[Work]:
    """What a worker computes to answer a request: its messages, and what it makes of the others'."""
    N, count = num_workers, asked.num_entries
    if asked.kind == "gather":
        return []
    if asked.kind == "dense":
        own, back = count, count / N
        return [
            Work(f"dense encode {asked.code}", {"calls": 1, "messages": N, "entries": own + back}),
            Work(f"dense decode {asked.code}", {"messages": N, "entries": 2 * count}),
        ]
    if asked.kind == "sparse" and collective == "split":
        received = count + union(asked, N)
        sent = count + union(asked, N) / N
        return [
            Work(f"split encode {asked.code}", {"calls": 1, "messages": N, "entries": sent}),
            Work(f"split decode {asked.code}", {"messages": N, "entries": received, "numel": asked.numel}),
        ]
    num_received = 1 if asked.kind == "index_broadcast" else N
    summed = asked.numel if asked.kind == "sparse" else 0
    return [
        Work(f"encode {asked.code}", {"calls": 1, "entries": count}),
        Work(f"decode {asked.code}", {"calls": 1, "entries": num_received * count, "numel": summed}),
    ]


def memory_bytes(asked: Asked, num_workers: int, collective: Collective) -> float:
    """Bytes that answering a request takes at its peak, beside the model and the residual."""
    moves = moves_of(asked, num_workers, collective)
    gathered = sum(m.sent_bytes for m in moves if m.kind in ("all_gather", "all_to_all"))
    if asked.kind in ("sparse", "index_gather") and collective != "split":
        return gathered + _BYTES_PER_DECODED_ENTRY * num_workers * asked.num_entries
    if asked.kind == "sparse":
        return gathered + _BYTES_PER_DECODED_ENTRY * union(asked, num_workers) / num_workers
    return gathered


def union(asked: Asked, num_workers: int) -> float:
    """Entries of the sum if the workers choose independently, the most there can be on average."""
    density = asked.num_entries / asked.numel
    return asked.numel * (1 - (1 - density) ** num_workers) if density < 1 else float(asked.numel)


def all_gather(message_bytes: float, num_workers: int) -> Move:
    """A ring: every message visits every worker."""
    hops = num_workers - 1
    return Move("all_gather", hops, hops, hops * message_bytes)


def all_reduce(vector_bytes: float, num_workers: int, kind: str = "all_reduce") -> Move:
    """A ring: the vector's parts are summed on one way round and handed out on a second."""
    hops = 2 * (num_workers - 1)
    return Move(kind, hops, hops, hops * vector_bytes / num_workers)


def all_to_all(part_bytes: float, num_workers: int) -> Move:
    """Every worker to every other, all at once."""
    others = num_workers - 1
    return Move("all_to_all", others, min(1, others), others * part_bytes)


def broadcast(message_bytes: float, num_workers: int) -> Move:
    """A tree: the number of workers that have the message doubles with every hop."""
    hops = ceil(log2(num_workers)) if num_workers > 1 else 0
    return Move("broadcast", hops, hops, hops * message_bytes)


def _message_bytes(count: int, numel: int, code: str) -> int:
    return full_message_bytes(count, numel, dtype=_DTYPE, value_code=code, index_code=_INDEX_CODE)


def _piece_bytes(asked: Asked, num_workers: int) -> int:
    """What goes to the owner of a region; values in blocks are cut at whole blocks (`distributed.split`)."""
    share = ceil(asked.num_entries / num_workers)
    if asked.code in NUM_SCALES:
        return _message_bytes(min(asked.num_entries, share + BLOCK), asked.numel, asked.code)
    region = ceil(asked.numel / num_workers)
    return _message_bytes(min(share, region), region, asked.code)


class _Segments(NamedTuple):
    largest: int
    total: int


@lru_cache(maxsize=4096)
def _segments(count: int, num_workers: int, code: str) -> _Segments:
    """Bytes of the segments of a dense vector, one for each worker's region of whole blocks."""
    num_blocks = -(-count // BLOCK)
    ends = [min(count, num_blocks * n // num_workers * BLOCK) for n in range(num_workers + 1)]
    counts = Counter(end - start for start, end in pairwise(ends) if end > start)
    sizes = {n: segment_bytes(n, dtype=_DTYPE, value_code=code) for n in counts}
    return _Segments(max(sizes.values()), sum(sizes[n] * times for n, times in counts.items()))
