"""Collectives over a process group that torch.distributed does not know by name."""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regtopk.distributed.transport.collectives import Collectives, as_bytes

_MOST_BYTES = 1 << 24  # of one rank's object


class BareCollectives(Collectives):
    """The same collectives by the group's own methods, `alltoall_base` and `broadcast` as torch has them.

    Failures stay what they are: the caller handles them.
    """

    store = None

    def __init__(self, group: Any, rank: int, num_workers: int) -> None:
        self.group, self.rank, self.num_workers = group, rank, num_workers
        self.ranks = list(range(num_workers))

    def _backend_for(self, device: str) -> None:
        """It cannot be asked."""

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(m,) of equal length on all ranks -> (N, m)."""
        gathered = tensor.new_empty(self.num_workers, tensor.numel())
        mine = as_bytes(tensor)
        sizes = [mine.numel()] * self.num_workers
        self._exchange(as_bytes(gathered).view(-1), mine.repeat(self.num_workers), sizes, sizes)
        return gathered

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        """parts[r] goes to rank r; returns what all ranks had for this one, of these sizes, in rank order."""
        received = parts[0].new_empty(sum(sizes))
        self._exchange(received, torch.cat(list(parts)), sizes, [part.numel() for part in parts])
        return list(received.split(sizes))

    def _exchange(self, received: Tensor, sent: Tensor, sizes: list[int], lengths: list[int]) -> None:
        self.group.alltoall_base(received, sent, sizes, lengths, dist.AllToAllOptions()).wait()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in rank order."""
        return tensor.copy_(self.all_gather(tensor.flatten()).sum(0).view_as(tensor))

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest of the ranks' values, entry by entry."""
        return self.all_gather(tensor).amax(0)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank `source` of this group."""
        options = dist.BroadcastOptions()
        options.rootRank = source
        self.group.broadcast([tensor], options).wait()
        return tensor

    def all_gather_objects(self, thing: Any) -> list[Any]:
        """Every rank's small Python object, in rank order."""
        message = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        return [
            pickle.loads(theirs.numpy().tobytes())
            for (theirs,) in self.all_gather_ragged([message], _MOST_BYTES)
        ]
