"""A cluster in which every other rank is a copy of this one: it sends the same, and nothing travels.

With it the real driver does the work of one of N ranks, for measuring that work and its messages.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regtopk.distributed.collectives import Collectives
from regtopk.distributed.options import Collective
from regtopk.distributed.rank import Rank


class Echo(Collectives):
    """Stand-ins for the collectives of rank 0 of N; `calls` lists each collective and its bytes."""

    def __init__(self, num_workers: int) -> None:
        self.rank = 0
        self.num_workers = num_workers
        self.calls: list[tuple[str, int]] = []

    def all_gather(self, tensor: Tensor) -> Tensor:
        """N copies of the tensor."""
        self.calls.append(("all_gather", tensor.numel() * tensor.itemsize))
        return tensor.repeat(self.num_workers, 1)

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        """N copies of the part for rank 0."""
        self.calls.append(("all_to_all", sum(part.numel() for part in parts[1:])))
        return [parts[0]] * self.num_workers

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """N times the tensor."""
        self.calls.append(("all_reduce", tensor.numel() * tensor.itemsize))
        return tensor * self.num_workers

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor."""
        self.calls.append(("broadcast", tensor.numel() * tensor.itemsize))
        return tensor


def echo_rank(
    num_workers: int,
    collective: Collective = "all_gather",
    now: Callable[[], float] = time.perf_counter,
) -> Rank:
    """Rank 0 of N, whose messages the other ranks repeat.

    Args:
        num_workers: N.
        collective: how sparse sums run.
        now: the clock of its phases.
    """
    weights = torch.full((num_workers,), 1 / num_workers, dtype=torch.float64)
    return Rank(Echo(num_workers), weights, collective=collective, now=now)
