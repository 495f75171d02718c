"""Parameters of which every rank holds a part, as fully_shard makes them: DTensors of one shard mesh.

DTensor is known here by its name and methods: importing it takes seconds, which most users need not wait for.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from regtopk.distributed.state.parameters import (
    NamedParameters,
    Parameters,
    facts,
    fsdp_version,
    is_dtensor,
    named_pairs,
    refuse_meta,
    uncompiled,
)
from regtopk.distributed.transport.collectives import EXAMPLE, Collectives, group_or_default
from regtopk.errors import ArgumentError, ClusterError


class Shards:
    """The ranks that hold the other parts of this rank's replica: the shard axis."""

    def __init__(self, named: Mapping[str, Any], replicas: dist.ProcessGroup) -> None:
        first, *others = named
        mesh: DeviceMesh = named[first].device_mesh
        for name in others:
            if named[name].device_mesh != mesh:
                here, there = (each.mesh.tolist() for each in (mesh, named[name].device_mesh))
                told = f"{first!r} on ranks {here} and {name!r} on ranks {there}"
                raise ClusterError(f"parameters must be on one mesh, got {told}")
        group = mesh.get_group()
        self.collectives = Collectives(group)
        self.place = [self.collectives.rank, self.collectives.num_workers]
        self.whole = facts(named)
        ranks, theirs = map(dist.get_process_group_ranks, (replicas, group))
        if set(ranks) & set(theirs) != {dist.get_rank()}:
            raise ClusterError(
                "the replicate group must share one rank with the shard group, this one, got ranks "
                f"{sorted(ranks)} beside shards on ranks {sorted(theirs)}: pass mesh['replicate'] {EXAMPLE}"
            )


class DenseMean:
    """What torch does over the replicas of a mesh of two dimensions."""

    def __init__(self, replicas: Collectives) -> None:
        self._replicas = replicas

    def __call__(self, flat: Tensor) -> None:
        """Average a unit's vector."""
        if self._replicas.num_workers > 1:
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self._replicas.group)


class ShardedParameters(Parameters):
    """This rank's parts of the sharded parameters that require a gradient."""

    takes_dtensors = True

    def _trainable(self, source: nn.Module | NamedParameters) -> dict[str, nn.Parameter]:
        self.reshard()
        check_placements(named_pairs(source))
        return super()._trainable(source)

    def check(self) -> None:
        """Refuse parameters that were added, replaced or reshaped since."""
        self.reshard()  # or the model shows others
        super().check()

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """This rank's parts, in the memory of the parameters: FSDP moves them in its first forward."""
        return {name: nn.Parameter(local(p), requires_grad=p.requires_grad) for name, p in self.whole.items()}

    def reshard(self) -> None:
        """Let go of whole parameters, which FSDP keeps after an evaluation: they hide what is written."""
        for _, module in units_by_name(self.module):
            module.reshard()

    def end_means(self) -> None:
        """Let gradients stay in their replica, where a `detach()` has left them to be averaged."""
        for name, module in units_by_name(self.module):
            if any(isinstance(group._all_reduce_hook, DenseMean) for group in groups_of(name, module)):
                module.set_all_reduce_hook(None)


def is_sharded(source: nn.Module | NamedParameters) -> bool:
    """Whether it has DTensors, or units of fully_shard, which may show whole parameters."""
    has_units = isinstance(source, nn.Module) and bool(units_by_name(source))
    return has_units or any(is_dtensor(p) for _, p in named_pairs(source))


def plain(source: nn.Module | NamedParameters) -> nn.Module | list[tuple[str, nn.Parameter]]:
    """The module without torch.compile around it, or pairs; a wrapped model is refused."""
    inner = uncompiled(source)
    if not isinstance(inner, nn.Module):
        return named_pairs(source)
    for part in inner.modules():
        if isinstance(part, DistributedDataParallel):
            raise ClusterError(
                "model must be plain, got a DistributedDataParallel, which averages gradients in every "
                "backward: hand over the module inside it, or exchange gradients by regtopk.attach"
            )
        if fsdp_version(part) == 1:
            raise ClusterError(f"model must be plain or of fully_shard (FSDP2), got {type(part).__name__}")
    refuse_hooks(inner)
    return inner


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def copied(thing: Any, other: Callable[[Any], Any] = deepcopy) -> Any:
    """A copy on the CPU, of a DTensor of this rank's part; `other` copies what is no tensor."""
    kind = type(thing)
    if isinstance(thing, Tensor):
        return local(thing).detach().to("cpu", copy=True)
    if kind in (dict, OrderedDict, Counter):
        new: Any = kind()
        new.update({copied(key, other): copied(value, other) for key, value in thing.items()})
        if hasattr(thing, "_metadata"):  # a module's: the versions of its parts
            new._metadata = dict(thing._metadata)
        return new
    if kind in (list, tuple, set, torch.Size):
        return kind(copied(value, other) for value in thing)
    return other(thing)


def shapes_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The shapes of this rank's parts; None for what is no tensor."""
    return {key: tuple(local(x).shape) if isinstance(x, Tensor) else None for key, x in state.items()}


def like(part: Tensor, whole: Any, device: str | None = None) -> Tensor:
    """A part as this rank's of a DTensor that is cut like another, on the same or another kind of device."""
    mesh = whole.device_mesh if device is None else _mesh_on(device, whole.device_mesh)
    dtensor: Tensor = type(whole).from_local(
        part, mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return dtensor


@lru_cache(maxsize=8)
def _mesh_on(device: str, mesh: DeviceMesh) -> DeviceMesh:
    """A mesh on another kind of device, without a process group: nothing is sent. It takes milliseconds."""
    return DeviceMesh(device, mesh.mesh, _init_backend=False)


def replicas_of(process_group: object) -> dist.ProcessGroup:
    """The process group of the replicate axis, which users hand over as such or as a mesh."""
    if not isinstance(process_group, (dist.ProcessGroup, DeviceMesh)):
        raise ArgumentError(
            "process_group must be the process group or mesh of the replicate axis for a sharded model, got "
            f"{process_group!r}: pass mesh['replicate'] {EXAMPLE}"
        )
    return group_or_default(process_group)


def units_by_name(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules that fully_shard was called on."""
    return [(name or "<root>", module) for name, module in model.named_modules() if fsdp_version(module) == 2]


def groups_of(name: str, module: Any) -> list[Any]:
    """torch's groups of a unit's parameters: one, or none if other units hold them all."""
    state = module._get_fsdp_state()
    if not hasattr(state, "_fsdp_param_groups"):  # torch 2.11
        return [state._fsdp_param_group] if state._fsdp_param_group else []
    groups = list(state._fsdp_param_groups)
    if len(groups) > 1:
        try:
            module.set_all_reduce_hook(None)
        except ValueError as error:
            raise ClusterError(f"FSDP unit {name!r} must have one parameter group: {error}") from error
    return groups


def refuse_hooks(model: nn.Module) -> None:
    """Refuse a model whose gradients are exchanged over the replicas already."""
    for name, module in units_by_name(model):
        for group in groups_of(name, module):
            if not isinstance(group._all_reduce_hook, (DenseMean, type(None))):
                raise ClusterError(
                    f"FSDP unit {name!r} must have no all-reduce hook, got one: call detach() of what "
                    "regtopk.attach gave"
                )


def check_placements(pairs: Iterable[tuple[str, Any]]) -> None:
    """Refuse what is no DTensor of a shard axis."""
    pairs = list(pairs)
    refuse_meta(pairs)
    for name, p in pairs:
        if not is_dtensor(p):
            raise ClusterError(
                f"parameter {name!r} must be sharded as the others are, got a plain tensor: call fully_shard "
                "on the whole model, too"
            )
        if p.device_mesh.ndim != 1:
            raise ClusterError(
                f"mesh of parameter {name!r} must have 1 dimension, the shard axis, got "
                f"{p.device_mesh.ndim}: over a second one torch averages densely by itself; call "
                f"fully_shard(..., mesh=mesh['shard']) {EXAMPLE}"
            )
        (placement,) = p.placements
        if not (placement.is_shard(0) or placement.is_replicate()):
            rule = "Shard(0) or Replicate()"
            raise ClusterError(f"placement of parameter {name!r} must be {rule}, got {placement!r}")
