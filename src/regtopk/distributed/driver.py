"""Answers an algorithm's requests on one rank of a process group.

All ranks receive the same bits: messages are coded without loss, and sums run from zero in rank order in at
least float32, as in the simulator. `deterministic=False` lets the backend add uncoded dense vectors instead.
"""

from typing import Any

from regtopk.core.requests import Broadcast, DenseSum, Gather, Peek, Request, SparseSum
from regtopk.distributed.broadcast import broadcast
from regtopk.distributed.dense_sum import dense_sum
from regtopk.distributed.gather import gather
from regtopk.distributed.rank import Rank
from regtopk.distributed.sparse_sum import sparse_sum
from regtopk.errors import OracleError

PEEKS = (  # why an oracle is refused
    "peeks at the sum of all workers' vectors before anything is sent: only a simulator can answer that "
    "(regtopk.simulate.Cluster), a real cluster cannot"
)


def answer(rank: Rank, request: Request) -> Any:
    """What the cluster makes of a request; all ranks must make the same kind of request."""
    if isinstance(request, SparseSum):
        return sparse_sum(rank, request)
    if isinstance(request, DenseSum):
        return dense_sum(rank, request)
    if isinstance(request, Gather):
        return gather(rank, request)
    if isinstance(request, Broadcast):
        return broadcast(rank, request)
    assert isinstance(request, Peek)
    raise OracleError(f"this algorithm {PEEKS}")
