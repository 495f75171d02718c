"""Byte counts against numbers worked out by hand, and where a number comes from a format, from this table."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from regtopk.algorithms import Dense, GlobalTopK, RandomK, RegTopK, TopK
from regtopk.core.algorithm import Algorithm, Conversation
from regtopk.core.requests import Broadcast, Gather, Request, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.state import NoState
from regtopk.core.worker import Worker
from regtopk.simulate import Cluster

# What docs/wire-format.md says of the index code "raw32" and uncoded values.
FRAME, INDEX, VALUE = 32, 4, {torch.float32: 4, torch.float64: 8, torch.bfloat16: 4, torch.float16: 4}


def message(count: int, dtype: torch.dtype = torch.float32) -> int:
    return FRAME + count * (INDEX + VALUE[dtype])


def segment(count: int, dtype: torch.dtype = torch.float32) -> int:
    return FRAME + count * VALUE[dtype]


@dataclass(frozen=True, kw_only=True)
class Asks(Algorithm[NoState]):
    """Asks what it is told to, and returns the gradient of worker 0."""

    name: ClassVar[str] = "asks"
    promises = frozenset()
    requests: Callable[[Tensor, Worker], list[Request]]

    def init(self, worker: Worker) -> NoState:
        return NoState()

    def exchange(self, grad: Tensor, state: NoState, worker: Worker) -> Conversation:
        answers = []
        for request in self.requests(grad, worker):
            answers.append((yield request))
        return grad[..., 0, :]


def bytes_of(cluster: Cluster, grads: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
    """Payload, sent, received bytes and entries of one step."""
    cluster.step(grads)
    step = cluster.last_step
    counts = (step.payload_bytes, step.sent_bytes, step.received_bytes, step.num_entries)
    payload, sent, received, entries = (count.tolist() for count in counts)
    return payload, sent, received, entries


@pytest.mark.parametrize("algorithm", [TopK(k=7), RegTopK(k=7)])
@pytest.mark.parametrize("dtype", VALUE)
def test_k_entries_travel_to_everybody(algorithm: Algorithm[NoState], dtype: torch.dtype) -> None:
    cluster = Cluster(algorithm, num_workers=3, index_code="raw32")
    size = message(7, dtype)
    expected = ([size] * 3, [2 * size] * 3, [2 * size] * 3, [7] * 3)
    assert bytes_of(cluster, torch.randn(3, 100, dtype=dtype)) == expected


def test_padding_is_not_counted() -> None:
    def requests(grad: Tensor, worker: Worker) -> list[Request]:
        indices = torch.arange(5).expand(3, 5)
        sparse = SparseGradient(indices, torch.ones(3, 5), numel=50, count=torch.tensor([5, 0, 2]))
        return [SparseSum(sparse, worker.weight)]

    cluster = Cluster(Asks(requests=requests), num_workers=3, index_code="raw32")
    a, b, c = message(5), message(0), message(2)
    # sent: all but the successor's; received: all but one's own
    expected = ([a, b, c], [a + c, a + b, b + c], [b + c, a + c, a + b], [5, 0, 2])
    assert bytes_of(cluster, torch.ones(3, 50)) == expected


def test_workers_of_weight_zero_forward_but_contribute_nothing() -> None:
    cluster = Cluster(TopK(k=7), num_workers=3, weights=[0.5, 0.0, 0.5], index_code="raw32")
    size = message(7)
    expected = ([size, 0, size], [2 * size, size, size], [size, 2 * size, size], [7, 0, 7])
    assert bytes_of(cluster, torch.randn(3, 100)) == expected


def test_a_dense_sum_is_reduced_by_regions_and_gathered() -> None:
    """J = 1000 are 8 blocks of 128: regions of 256, 256, 256 and 232 entries for 4 workers.

    A worker sends the three regions of others, then forwards all sums but its successor's; it receives its
    own region from three, then all sums but its own.
    """
    long, short = segment(256), segment(232)
    payload = 3 * long + short
    sent = [2 * (2 * long + short)] * 2 + [2 * long + short + 3 * long, 3 * long + 2 * long + short]
    received = [3 * long + 2 * long + short] * 3 + [3 * short + 3 * long]
    counts = bytes_of(Cluster(Dense(), num_workers=4), torch.randn(4, 1000))
    assert counts == ([payload] * 4, sent, received, [1000] * 4)


@pytest.mark.parametrize("algorithm", [RandomK(k=10), GlobalTopK(k=10)])
def test_a_shared_support_sends_no_index_and_a_peek_costs_nothing(algorithm: Algorithm[NoState]) -> None:
    """10 values are one block, which one worker (the last) sums: it gets one segment and sends one."""
    size = segment(10)
    counts = bytes_of(Cluster(algorithm, num_workers=2), torch.randn(2, 100))
    assert counts == ([size, size], [size, size], [size, size], [10, 10])


def test_gathered_entries_count_in_full() -> None:
    def requests(grad: Tensor, worker: Worker) -> list[Request]:
        chosen = torch.zeros(3, 4, dtype=torch.int64)
        return [Gather(chosen), Gather(grad[:, :6], count=torch.tensor([6, 1, 0]))]

    # 4 int64 of 8 bytes from everybody; then 6, 1 and 0 float32 of 4 bytes
    payload = [32 + 24, 32 + 4, 32 + 0]
    sent, received = [64 + 24 + 0, 64 + 24 + 4, 64 + 4 + 0], [64 + 4 + 0, 64 + 24 + 0, 64 + 24 + 4]
    counts = bytes_of(Cluster(Asks(requests=requests), num_workers=3), torch.ones(3, 50))
    assert counts == (payload, sent, received, [10, 5, 4])


@pytest.mark.parametrize(("source", "sent"), [(0, [40, 40, 0]), (1, [0, 40, 40]), (2, [40, 0, 40])])
def test_a_broadcast_is_passed_on_along_the_ring(source: int, sent: list[int]) -> None:
    cluster = Cluster(Asks(requests=lambda grad, worker: [Broadcast(grad[:, :10], source)]), num_workers=3)
    at_source = [rank == source for rank in range(3)]
    received = [0 if is_source else 40 for is_source in at_source]
    counts = bytes_of(cluster, torch.ones(3, 50))
    assert counts == ([40 * s for s in at_source], sent, received, [10 * s for s in at_source])


def test_dense_bytes_are_those_of_a_float32_all_reduce() -> None:
    for dtype in VALUE:
        cluster = Cluster(TopK(k=1), num_workers=8)
        cluster.step(torch.ones(8, 1000, dtype=dtype))
        assert cluster.last_step.dense_bytes.tolist() == [7000] * 8  # 2 · 7/8 · 4000


def test_the_total_is_the_sum_of_all_steps() -> None:
    cluster = Cluster(TopK(density=lambda step: [0.1, 0.5][step]), num_workers=2, index_code="raw32")
    cluster.step(torch.randn(2, 20))
    assert cluster.last_step.payload_bytes.tolist() == [message(2)] * 2
    cluster.step(torch.randn(2, 20))
    assert cluster.last_step.payload_bytes.tolist() == [message(10)] * 2
    assert cluster.total.payload_bytes.tolist() == [message(2) + message(10)] * 2
    assert cluster.total.num_entries.tolist() == [12, 12]
    assert cluster.total.dense_bytes.tolist() == [2 * 80] * 2
