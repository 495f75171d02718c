"""What an exchange takes of a worker: the work, the collectives and their bytes, and the memory.

The collectives are those that `distributed` runs on gloo. Sizes come from `core.codes` and `core.regions`:
where a message's size depends on J and k alone, they are those of the real messages.
"""

from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

import torch

from regtopk.core.codes import full_message_bytes
from regtopk.core.regions import region_bytes, sender_code, split_of
from regtopk.core.requests import Broadcast, DenseSum, Peek, Request, SenderSum, SparseSum
from regtopk.core.traffic import LONGEST_DIRECT_BYTES

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
    num_parts: int = 1
    every: int = 1  # how many steps a worker takes from one exchange to the next
    delay: int | None = None  # steps that a part may travel beside; None: all parts but the last, a backward

    @property
    def bytes_per_step(self) -> float:
        """Payload of a step: all of it, or its share of an exchange of updates."""
        return self.payload_bytes / self.every

    @property
    def lines(self) -> set[str]:
        """The names of the costs that its time is computed from."""
        return {work.line for work in (*self.work, *(move.work for move in self.moves))}


def answer(
    request: Request, length: int, numel: int, N: int, *, is_ragged: bool = False, is_split: bool = False
) -> Exchange:
    """How N workers answer a request.

    Args:
        request: as it was made on a small vector.
        length: of what each worker sends, on the real one.
        numel: of the vector that its entries belong to.
        N: the number of workers, all of them sending.
        is_ragged: whether ranks must tell one another the sizes of their messages first.
        is_split: whether a sparse sum is split by index region, instead of gathered by all.
    """
    if isinstance(request, DenseSum):
        return _dense_sum(request, length, N)
    assert not isinstance(request, Peek), "only a simulator can answer a Peek"
    if isinstance(request, SparseSum):
        if is_split:
            return _split_sum(request, length, numel, N)
        code, dtype = request.sparse.code, request.sparse.values.dtype
        size = full_message_bytes(length, numel, dtype=dtype, value_code=code, index_code=INDEX_CODE)
        work = _coding(code, length, N, numel, _senders(request))
    elif request.numel is None:  # it travels as it is
        size, work, is_ragged = length * request.tensor.itemsize, [], True
    else:
        size = full_message_bytes(
            length, numel, dtype=torch.float32, value_code="none", index_code=INDEX_CODE
        )
        work = _coding("none", length, 1 if isinstance(request, Broadcast) else N)
    if isinstance(request, Broadcast):
        return Exchange(size, [broadcast(size, N)], work)
    moves = [all_gather(SIZES_BYTES, N)] * is_ragged + [all_gather(size, N)]
    decoded_bytes = _BYTES_PER_DECODED_ENTRY * N * length if work else 0
    return Exchange(size, moves, work, sum(move.sent_bytes for move in moves) + decoded_bytes)


def _coding(code: str, length: int, num_received: int, numel: int = 0, senders: str = "") -> list[Work]:
    decoded: Units = {"calls": 1, "entries": num_received * length, "numel": numel}
    return [Work(f"encode {code}", {"calls": 1, "entries": length}), Work(f"decode {code}{senders}", decoded)]


def _senders(request: SparseSum) -> str:
    """What the cost of decoding is called where it also finds out who sent each entry."""
    return " senders" if isinstance(request, SenderSum) else ""


def _dense_sum(request: DenseSum, length: int, N: int) -> Exchange:
    """Parts to the owners of the regions, and the sums from them."""
    codes = request.code, request.sum_code
    parts, sums = (region_bytes(length, N, (), request.weight.dtype, code) for code in codes)
    moves = [all_to_all(max(parts), N), all_gather(max(sums), N)]
    work = [
        Work(f"dense encode {request.code}", {"calls": 1, "messages": N, "entries": length + length / N}),
        Work(f"dense decode {request.code}", {"messages": N, "entries": 2 * length}),
    ]
    return Exchange(sum(parts), moves, work, sum(move.sent_bytes for move in moves))


def _split_sum(request: SparseSum, length: int, numel: int, N: int) -> Exchange:
    """Pieces to the owners of the regions, and the sums from them; sizes are told before both."""
    code, dtype = request.sparse.code, request.sparse.values.dtype
    senders = sender_code([1 / N] * N) if isinstance(request, SenderSum) else None
    size = split_of(
        length, numel, N, dtype=dtype, value_code=code, index_code=INDEX_CODE, sender_code=senders
    )
    moves = [
        all_gather(8 * N, N),
        all_to_all(size.piece_bytes, N),
        all_gather(8, N),
        all_to_all(size.sums_bytes, N),
    ]
    decoded: Units = {"messages": N, "entries": length + size.union, "numel": numel}
    work = [
        Work(f"split encode {code}", {"calls": 1, "messages": N, "entries": length + size.union / N}),
        Work(f"split decode {code}{_senders(request)}", decoded),
    ]
    memory_bytes = sum(move.sent_bytes for move in moves) + _BYTES_PER_DECODED_ENTRY * size.union / N
    return Exchange(N * size.piece_bytes, moves, work, memory_bytes)


def all_gather(message_bytes: float, num_workers: int) -> Move:
    """A ring: every message visits every worker. Short ones are sent to everybody at once."""
    others = num_workers - 1
    hops = min(1, others) if message_bytes <= LONGEST_DIRECT_BYTES else others
    return Move("all_gather", others, hops, others * message_bytes)


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
