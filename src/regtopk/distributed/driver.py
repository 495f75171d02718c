"""Answers algorithms' requests on one rank of a process group.

All ranks receive the same bits: messages are coded without loss, and sums run from zero in rank order in at
least float32, as in the simulator. `deterministic=False` lets the backend add uncoded dense vectors instead.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regtopk.core.algorithm import Conversation
from regtopk.core.requests import Broadcast, DenseSum, Gather, Peek, Request, SparseSum
from regtopk.distributed.broadcast import broadcast
from regtopk.distributed.dense_sum import dense_sum
from regtopk.distributed.gather import gather
from regtopk.distributed.rank import Rank, SumBuffer
from regtopk.distributed.sparse_sum import sparse_sums
from regtopk.errors import OracleError

PEEKS = (  # why an oracle is refused
    "peeks at the sum of all workers' vectors before anything is sent: only a simulator can answer that "
    "(regtopk.simulate.Cluster), a real cluster cannot"
)


def converse(rank: Rank, conversations: Sequence[Conversation], sums: Sequence[SumBuffer]) -> list[Tensor]:
    """Run the conversations of several buckets to their ends, side by side, and return the aggregates.

    Sparse vectors that are sent at the same time travel together. What is wrong with a message is raised
    before anything else is sent, or by `rank.raise_refusals()` when the caller has nothing left to launch.
    """
    aggregates: dict[int, Tensor] = {}
    requests: dict[int, Request] = {}

    def go_on(number: int, given: Any) -> None:
        try:
            requests[number] = conversations[number].send(given)
        except StopIteration as done:
            aggregates[number] = done.value
            requests.pop(number, None)

    for number in range(len(conversations)):
        go_on(number, None)
    while requests:
        numbers = list(requests)
        answers = answer(rank, list(requests.values()), [sums[number] for number in numbers])
        for number, given in zip(numbers, answers, strict=True):
            go_on(number, given)
    return [aggregates[number] for number in range(len(conversations))]


def answer(rank: Rank, requests: Sequence[Request], sums: Sequence[SumBuffer]) -> list[Any]:
    """What the cluster makes of requests; all ranks must make the same kinds of requests.

    Args:
        rank: this one.
        requests: at most one of each bucket.
        sums: where the sums of their buckets are made.
    """
    rank.raise_refusals()
    pairs = [(asked, own) for asked, own in zip(requests, sums, strict=True) if isinstance(asked, SparseSum)]
    totals = iter(sparse_sums(rank, pairs))
    return [next(totals) if isinstance(asked, SparseSum) else _answer(rank, asked) for asked in requests]


def _answer(rank: Rank, request: Request) -> Any:
    if isinstance(request, DenseSum):
        return dense_sum(rank, request)
    if isinstance(request, Gather):
        return gather(rank, request)
    if isinstance(request, Broadcast):
        return broadcast(rank, request)
    assert isinstance(request, Peek)
    raise OracleError(f"this algorithm {PEEKS}")
