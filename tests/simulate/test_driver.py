"""Answers have the shapes that requests promise, and are never the sender's memory."""

import torch
from torch import Tensor

from regtopk.core.requests import Broadcast, Gather
from regtopk.core.worker import Layout, Worker
from regtopk.simulate.driver import SimulatedDriver

WEIGHT = torch.tensor([[0.5], [0.25], [0.25]])
ROWS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def driver(*replicas: int) -> SimulatedDriver:
    index = torch.arange(3).unsqueeze(-1)
    return SimulatedDriver(Worker(WEIGHT, index, 3, 0, Layout.anonymous(4), (*replicas, 3)))


def test_what_is_gathered_and_broadcast_is_a_copy() -> None:
    def same_memory(left: Tensor, right: Tensor) -> bool:
        return left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()

    gathered = driver().answer(Gather(ROWS, count=torch.tensor([2, 1, 0])))
    assert torch.equal(gathered.rows, ROWS) and gathered.counts.tolist() == [2, 1, 0]
    assert driver().answer(Gather(ROWS)).counts.tolist() == [2, 2, 2]
    received = driver().answer(Broadcast(ROWS, source=1))
    assert received.tolist() == [3.0, 4.0]
    assert not same_memory(gathered.rows, ROWS) and not same_memory(received, ROWS)
    assert driver(2).answer(Broadcast(ROWS.expand(2, 3, 2), source=2)).tolist() == [[[5.0, 6.0]]] * 2
