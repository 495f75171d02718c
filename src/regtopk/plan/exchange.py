"""What an exchange takes of a worker: the work, the collectives and their bytes, and the memory.

The collectives are those that `distributed` runs on gloo. Sizes come from `core.traffic` and `core.regions`:
where a message's size depends on J and k alone, they are those of the real messages.
"""

from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

import torch

from regtopk.core.regions import region_bytes, sender_code, split_of
from regtopk.core.requests import Broadcast, DenseSum, Gather, Request, SenderSum, SparseSum
from regtopk.core.traffic import contribution, numbers_bytes
from regtopk.core.worker import Layout, Worker

Units = dict[str, float]
INDEX_CODE = "elias-fano"
SIZES_BYTES = 16  # what ranks tell one another before messages of unequal size: two int64
_BYTES_PER_DECODED_ENTRY = 64  # that decoding and summing take at the peak


class Work(NamedTuple):
    """Local work: the name of its cost in a calibration, and how many units of it."""

    line: str
    units: Units


class Move(NamedTuple):
    """One collective on a worker's interface."""

    kind: str
    num_messages: int  # that a worker sends one after another
    num_hops: int  # one after another, until the last byte arrives: each costs the latency
    sent_bytes: float  # through the interface, which receives as many at the same time

    @property
    def work(self) -> Work:
        """What it takes from the processor."""
        return Work(f"move {self.kind}", {"messages": self.num_messages, "bytes": self.sent_bytes})


class Exchange(NamedTuple):
    """An exchange: equal parts one after another, each with this work and these moves."""

    payload_bytes: int  # of the messages that a worker contributes, of all parts
    moves: Sequence[Move]
    work: Sequence[Work]
    memory_bytes: float = 0.0  # of the messages at the peak
    num_parts: int = 1  # all but the last may run beside the backward pass
    every: int = 1  # how many steps a worker takes from one exchange to the next

    @property
    def bytes_per_step(self) -> float:
        """Payload of a step: all of it, or its share of an exchange of updates."""
        return self.payload_bytes / self.every

    @property
    def lines(self) -> set[str]:
        """The names of the costs that its time is computed from."""
        return {work.line for work in (*self.work, *(move.work for move in self.moves))}


def answer(
    request: Request, num_workers: int, *, is_ragged: bool = False, is_split: bool = False
) -> Exchange:
    """How N workers answer a request, whose tensors may be on the "meta" device.

    Args:
        request: of the real shapes.
        num_workers: N, all of them sending.
        is_ragged: whether ranks must tell one another the sizes of their messages first.
        is_split: whether a sparse sum is split by index region, instead of gathered by all.
    """
    N = num_workers
    if isinstance(request, DenseSum):
        return _dense_sum(request, N)
    if isinstance(request, SparseSum) and is_split:
        return _split_sum(request, N)
    worker = Worker(torch.ones(()), torch.tensor(0), N, 0, Layout.anonymous(1), index_code=INDEX_CODE)
    size = int(contribution(request, worker).payload_bytes)
    if isinstance(request, Broadcast):
        return Exchange(size, [broadcast(size, N)], _coding("none", request.tensor.shape[-1], 1, 0))
    assert isinstance(request, (SparseSum, Gather)), "only a simulator can answer a Peek"
    travels_as_it_is = isinstance(request, Gather) and request.numel is None
    tells_sizes = is_ragged or travels_as_it_is
    moves = [all_gather(SIZES_BYTES, N)] * tells_sizes + [all_gather(size, N)]
    memory_bytes = sum(move.sent_bytes for move in moves)
    if travels_as_it_is:
        return Exchange(size, moves, [], memory_bytes)
    if isinstance(request, SparseSum):
        count, numel, code = request.sparse.indices.shape[-1], request.sparse.numel, request.sparse.code
    else:
        count, numel, code = request.tensor.shape[-1], 0, "none"
    memory_bytes += _BYTES_PER_DECODED_ENTRY * N * count
    return Exchange(size, moves, _coding(code, count, N, numel, _senders(request)), memory_bytes)


def _coding(code: str, count: int, num_received: int, numel: int, senders: str = "") -> list[Work]:
    decoded: Units = {"calls": 1, "entries": num_received * count, "numel": numel}
    return [Work(f"encode {code}", {"calls": 1, "entries": count}), Work(f"decode {code}{senders}", decoded)]


def _senders(request: Request) -> str:
    """What the cost of decoding is called where it also finds out who sent each entry."""
    return " senders" if isinstance(request, SenderSum) else ""


def _dense_sum(request: DenseSum, N: int) -> Exchange:
    """Parts to the owners of the regions, and the sums from them."""
    count, dtype = request.tensor.shape[-1], request.weight.dtype
    parts, sums = (region_bytes(count, N, (), dtype, code) for code in (request.code, request.sum_code))
    moves = [all_to_all(max(parts), N), all_gather(max(sums), N)]
    work = [
        Work(f"dense encode {request.code}", {"calls": 1, "messages": N, "entries": count + count / N}),
        Work(f"dense decode {request.code}", {"messages": N, "entries": 2 * count}),
    ]
    return Exchange(sum(parts), moves, work, sum(move.sent_bytes for move in moves))


def _split_sum(request: SparseSum, N: int) -> Exchange:
    """Pieces to the owners of the regions, and the sums from them; sizes are told before both."""
    sparse = request.sparse
    count, numel, code = sparse.indices.shape[-1], sparse.numel, sparse.code
    size = split_of(
        count,
        numel,
        N,
        dtype=sparse.values.dtype,
        value_code=code,
        index_code=INDEX_CODE,
        sender_code=sender_code([1 / N] * N) if isinstance(request, SenderSum) else None,
    )
    sums_bytes = size.sums_bytes
    if isinstance(request, SenderSum):
        sums_bytes += numbers_bytes(request.numbers)
    moves = [
        all_gather(8 * N, N),
        all_to_all(size.piece_bytes, N),
        all_gather(8, N),
        all_to_all(sums_bytes, N),
    ]
    work = [
        Work(f"split encode {code}", {"calls": 1, "messages": N, "entries": count + size.union / N}),
        Work(
            f"split decode {code}{_senders(request)}",
            {"messages": N, "entries": count + size.union, "numel": numel},
        ),
    ]
    memory_bytes = sum(move.sent_bytes for move in moves) + _BYTES_PER_DECODED_ENTRY * size.union / N
    return Exchange(N * size.piece_bytes, moves, work, memory_bytes)


def all_gather(message_bytes: float, num_workers: int) -> Move:
    """A ring: every message visits every worker."""
    hops = num_workers - 1
    return Move("all_gather", hops, hops, hops * message_bytes)


def all_reduce(vector_bytes: float, num_workers: int, kind: str = "all_reduce") -> Move:
    """A ring: the vector's parts go round once to be summed, and once more to reach everybody."""
    hops = 2 * (num_workers - 1)
    return Move(kind, hops, hops, hops * vector_bytes / num_workers)


def all_to_all(part_bytes: float, num_workers: int) -> Move:
    """Every worker to every other, all at once."""
    others = num_workers - 1
    return Move("all_to_all", others, min(1, others), others * part_bytes)


def broadcast(message_bytes: float, num_workers: int) -> Move:
    """A tree: the number of workers that have the message doubles with every hop."""
    hops = ceil(log2(num_workers))
    return Move("broadcast", hops, hops, hops * message_bytes)
