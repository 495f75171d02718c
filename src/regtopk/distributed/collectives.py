"""The few collectives the driver needs, over torch.distributed, with errors that say what to do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regtopk.errors import ClusterError

# torch 2.13 renamed it, and warns of the old name
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives:
    """Collectives over one process group; every rank must call the same ones in the same order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_workers = dist.get_world_size(group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(m,) of equal length on all ranks -> (N, m)."""
        gathered = tensor.new_empty(self.num_workers, tensor.numel())
        with clear_errors("all_gather"):
            _all_gather_single(gathered.view(-1), tensor.contiguous(), group=self.group)
        return gathered

    def all_gather_ragged(self, tensor: Tensor) -> tuple[Tensor, list[int]]:
        """(m_n,) of any length -> (N, longest), shorter ones followed by zeros, and the lengths."""
        length = torch.tensor([tensor.numel()], device=tensor.device)
        lengths: list[int] = self.all_gather(length).flatten().tolist()
        padded = tensor.new_zeros(max(lengths))
        padded[: tensor.numel()] = tensor
        return self.all_gather(padded), lengths

    def all_to_all(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """parts[r] goes to rank r, of any length; what the others had for this rank, in rank order."""
        lengths = torch.tensor([part.numel() for part in parts], device=parts[0].device)
        incoming = torch.empty_like(lengths)
        with clear_errors("all_to_all"):
            dist.all_to_all_single(incoming, lengths, group=self.group)
            sizes = incoming.tolist()
            received = parts[0].new_empty(sum(sizes))
            dist.all_to_all_single(
                received, torch.cat(list(parts)), sizes, lengths.tolist(), group=self.group
            )
        return list(received.split(sizes))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in whatever order the backend adds."""
        with clear_errors("all_reduce"):
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest of the ranks' values, entry by entry."""
        with clear_errors("all_reduce"):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tensor

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank `source` of this group."""
        with clear_errors("broadcast"):
            dist.broadcast(tensor, group_src=source, group=self.group)
        return tensor

    def gather_objects(self, thing: Any) -> list[Any]:
        """Every rank's small Python object, in rank order."""
        things: list[Any] = [None] * self.num_workers
        with clear_errors("all_gather_object"):
            dist.all_gather_object(things, thing, group=self.group)
        return things


def ring_gather(sizes: list[int], rank: int) -> tuple[int, int]:
    """Bytes a ring all_gather of such messages sends from and brings to a rank."""
    successor = (rank + 1) % len(sizes)
    return sum(sizes) - sizes[successor], sum(sizes) - sizes[rank]


@contextmanager
def clear_errors(collective: str) -> Iterator[None]:
    """Turn a backend's failure into one that says what happened and what to do."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise ClusterError(
            f"{collective} failed: a rank has stopped, is unreachable or is slower than the process group's "
            f"timeout; restart all ranks from the last checkpoint. The backend says: {error}"
        ) from error


def group_of_its_own(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A new process group of the same ranks, backend and timeout: our collectives never mix with others'."""
    group = group or dist.group.WORLD
    assert group is not None
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    timeout = group._get_backend(device).options._timeout
    ranks = dist.get_process_group_ranks(group)
    is_world = len(ranks) == dist.get_world_size()
    own = dist.new_group(
        ranks, timeout=timeout, backend=dist.get_backend(group), use_local_synchronization=not is_world
    )
    assert isinstance(own, dist.ProcessGroup)
    return own
