"""The few collectives the driver needs, over torch.distributed, with errors that say what to do."""

import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# Its functions take the world group of that moment as a default, and DDP imports it: after init_process_group
# that keeps the group, and gloo's threads, for good. A thread that lets go of a tensor while Python exits
# aborts the rank ("terminate called without an active exception"). Imported now, there is no group to keep.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from regtopk.core.link import Link
from regtopk.core.traffic import goes_directly
from regtopk.distributed.transport.rooms import Rooms
from regtopk.errors import ArgumentError, ClusterError

EXAMPLE = "of mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard'))"
LONGEST_OBJECT_BYTES = 1 << 24  # of one rank, in a group that torch.distributed does not know
Sizes = Sequence[int]
WORLD_SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # as launchers tell it

# torch 2.13 renamed it, and warns of the old name
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives:
    """Collectives over one process group; every rank must call the same ones in the same order."""

    link: Link | None = None  # between the ranks, if it is known

    def __init__(self, group: dist.ProcessGroup, link: Link | None = None) -> None:
        self.group, self.link = group, link
        self.rank = dist.get_rank(group)
        self.num_workers = dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)  # as users know them, in the group's order
        self.rooms = Rooms()

    @property
    def store(self) -> Any:
        """Where the ranks of the group met, and can leave words for each other; MPI has none."""
        return dist.distributed_c10d._get_process_group_store(self.group)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(m,) of equal length on all ranks -> (N, m); of one rank a view of the same memory."""
        if self.num_workers == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty(self.num_workers, tensor.numel())
        if self.goes_directly(tensor.nbytes, tensor.device):
            copies = as_bytes(tensor).repeat(self.num_workers)
            self._send("all_gather", as_bytes(gathered).view(-1), copies)
        else:
            with clear_errors("all_gather"):
                _all_gather_single(gathered.view(-1), tensor.contiguous(), group=self.group)
        return gathered

    def all_gather_padded(self, tensor: Tensor, longest: int) -> Tensor:
        """(m_n,) of any length up to the longest -> (N, longest), shorter ones followed by zeros."""
        padded = tensor.new_zeros(longest)
        padded[: tensor.numel()] = tensor
        return self.all_gather(padded)

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        """parts[r] goes to rank r; returns what all ranks had for this one, of these sizes, in rank order."""
        if self.num_workers == 1:
            return list(parts)
        received = parts[0].new_empty(sum(sizes))
        lengths = [part.numel() for part in parts]
        self._send("all_to_all", received, torch.cat(list(parts)), sizes, lengths)
        return list(received.split(sizes))

    def _send(
        self, call: str, received: Tensor, sent: Tensor, sizes: Sizes = (), lengths: Sizes = ()
    ) -> None:
        """all_to_all: pieces of these sizes come in, pieces of these lengths go out; equal ones if empty."""
        with clear_errors(call):
            dist.all_to_all_single(received, sent, list(sizes), list(lengths), group=self.group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in whatever order the backend adds."""
        if self.num_workers > 1:
            with clear_errors("all_reduce"):
                dist.all_reduce(tensor, group=self.group)
        return tensor

    def maximum(self, tensor: Tensor) -> Tensor:
        """The largest of the ranks' values, entry by entry, of a short vector."""
        return self.all_gather(tensor).amax(0)

    def goes_directly(self, num_bytes: int, device: torch.device) -> bool:
        """Whether a vector is sent to every rank directly: the same on all ranks, as their lengths are."""
        return goes_directly(num_bytes, self.num_workers, self.link) and not self.is_on_device(device)

    def is_on_device(self, device: torch.device) -> bool:
        """Whether collectives run on the device itself, as NCCL's do: the host does not wait for them."""
        return device.type == "cuda" and self._backend_for("cuda") == "nccl"

    def device_for_flags(self, device: torch.device) -> torch.device:
        """Where a few numbers for the host are gathered from: not a GPU if the host would wait for it."""
        goes_by_cpu = not self.is_on_device(device) and self._backend_for("cpu") is not None
        return torch.device("cpu") if goes_by_cpu else device

    def _backend_for(self, device: str) -> str | None:
        """The name of what moves the tensors of a kind of device; None if nothing does."""
        try:
            return str(self.group._get_backend(torch.device(device)).name())
        except RuntimeError:
            return None

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of rank `source` of this group."""
        if self.num_workers > 1:
            with clear_errors("broadcast"):
                dist.broadcast(tensor, group_src=source, group=self.group)
        return tensor

    def all_gather_objects(self, thing: Any) -> list[Any]:
        """Every rank's small Python object, in rank order."""
        things = [thing] * self.num_workers
        if self.num_workers > 1:
            with clear_errors("all_gather_object"):
                dist.all_gather_object(things, thing, group=self.group)
        return things

    def gather_objects(self, thing: Any, destination: int) -> list[Any] | None:
        """Every rank's Python object, in rank order, on one rank; None on the others."""
        things = [thing] * self.num_workers if self.rank == destination else None
        if self.num_workers > 1:
            with clear_errors("gather_object"):
                dist.gather_object(thing, things, group_dst=destination, group=self.group)
        return things


class Alone(Collectives):
    """The collectives of one process without a process group."""

    store = None

    def __init__(self) -> None:
        self.rank, self.num_workers, self.ranks, self.rooms = 0, 1, [0], Rooms()

    def _backend_for(self, device: str) -> None:
        """There is none."""


class BareCollectives(Collectives):
    """Collectives over a group that torch.distributed does not know by name, by the group's own methods.

    Failures stay what they are, for the caller.
    """

    store = None

    def __init__(self, group: Any, rank: int, num_workers: int) -> None:
        self.group, self.rank, self.num_workers = group, rank, num_workers
        self.ranks, self.rooms = list(range(num_workers)), Rooms()

    def _backend_for(self, device: str) -> None:
        """It cannot be asked."""

    def goes_directly(self, num_bytes: int, device: torch.device) -> bool:
        """Always, in copies."""
        return True

    def _send(
        self, call: str, received: Tensor, sent: Tensor, sizes: Sizes = (), lengths: Sizes = ()
    ) -> None:
        options = dist.AllToAllOptions()
        self.group.alltoall_base(received, sent, list(sizes), list(lengths), options).wait()

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
        sizes = self.all_gather(torch.tensor([message.numel()])).flatten().tolist()
        for rank, size in zip(self.ranks, sizes, strict=True):
            check_size(rank, size, LONGEST_OBJECT_BYTES)
        everyone = self.all_gather_padded(message, max(sizes))
        return [pickle.loads(theirs.numpy().tobytes()) for theirs in everyone]


def by_rank(texts: Iterable[str], ranks: Sequence[int]) -> str:
    """What each rank has, in words."""
    return ", ".join(f"{text} on rank {rank}" for rank, text in zip(ranks, texts, strict=True))


def check_size(rank: int, size: int, limit: int) -> None:
    """Refuse a size that no rank can mean, before memory is taken for it."""
    if not 0 <= size <= limit:
        raise ClusterError(
            f"rank {rank} announces {size} bytes or entries, but there can be 0 to {limit}: it runs another "
            "program, or its memory is damaged; restart all ranks from the last checkpoint"
        )


@contextmanager
def clear_errors(collective: str) -> Iterator[None]:
    """Turn a backend's failure into an error that says what happened and what to do."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise ClusterError(
            f"{collective} failed: a rank has stopped, perhaps before the others (see stop_when), is "
            "unreachable or is slower than the process group's timeout; restart all ranks from the last "
            f"checkpoint. The backend says: {error}"
        ) from error


def group_or_default(given: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The process group that users hand over, as such, as a mesh, or as None, the default group."""
    if not dist.is_initialized():
        raise ClusterError("torch.distributed must be initialised first: call init_process_group()")
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ArgumentError(
                f"process_group must be a process group or a mesh of 1 dimension, got one of {given.ndim}: "
                f"pass mesh['replicate'] {EXAMPLE}"
            )
        given = given.get_group()
    group = dist.group.WORLD if given is None else given
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ClusterError(f"this rank must be in the process group, got {group!r} on rank {dist.get_rank()}")
    return group


def collectives_of(group: dist.ProcessGroup | None) -> Collectives:
    """Of all ranks if it is None; one process needs no process group."""
    is_alone = group is None and not dist.is_initialized() and is_one_process()
    return Alone() if is_alone else Collectives(group_or_default(group))


def is_one_process() -> bool:
    """Whether this process trains alone: no launcher started others, and no process group holds others."""
    if dist.is_initialized():
        return dist.get_world_size() == 1
    return all(os.environ.get(name, "1") == "1" for name in WORLD_SIZES)


def new_group_like(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A new process group of the same ranks, backend and timeout, for another thread's collectives."""
    if not is_world(group):
        # torch names a group that only its own ranks make after the number of groups a process has. Where
        # ranks differ in it, they would wait for one another under different names: groups of one rank add up
        num_groups = len(dist.distributed_c10d._world.pg_names)
        for _ in range(max(Collectives(group).all_gather_objects(num_groups)) - num_groups):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
    new = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=getattr(getattr(group._get_backend(device), "options", None), "_timeout", None),  # MPI: none
        backend=dist.get_backend(group),
        use_local_synchronization=not is_world(group),
    )
    assert isinstance(new, dist.ProcessGroup)
    return new


def is_world(group: dist.ProcessGroup) -> bool:
    """Whether a group holds all ranks."""
    return len(dist.get_process_group_ranks(group)) == dist.get_world_size()


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: backends differ in the dtypes they know."""
    return tensor.contiguous().view(torch.uint8)
