"""Collectives over a process group that torch.distributed does not know by name."""

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regtopk.distributed.transport.collectives import Collectives

_MOST_BYTES = 1 << 24  # of one rank's object


class BareCollectives(Collectives):
    """The same collectives by the group's own methods. Its failures stay what they are, for the caller."""

    store = None

    def __init__(self, group: Any, rank: int, num_workers: int) -> None:
        self.group, self.rank, self.num_workers = group, rank, num_workers
        self.ranks = list(range(num_workers))

    def _backend_for(self, device: str) -> None:
        """It cannot be asked."""

    def _goes_directly(self, tensor: Tensor) -> bool:
        return True

    def _send(self, call: str, received: Tensor, sent: Tensor, *sizes: list[int]) -> None:
        sizes = sizes or ([], [])
        self.group.alltoall_base(received, sent, *sizes, dist.AllToAllOptions()).wait()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in rank order."""
        return tensor.copy_(self.all_gather(tensor.flatten()).sum(0).view_as(tensor))

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank `source` of this group."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self.group.broadcast([tensor], options).wait()
        return tensor

    def all_gather_objects(self, thing: Any) -> list[Any]:
        """Every rank's small Python object, in rank order."""
        message = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        everyone = self.all_gather_ragged([message], _MOST_BYTES)
        return [pickle.loads(theirs.numpy().tobytes()) for (theirs,) in everyone]
