"""States that checkpoints hold: copied when they are saved, and compared with what they are loaded into."""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from regtopk.distributed.state.parameters import is_dtensor, uncompiled
from regtopk.distributed.state.shards import like, local
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.errors import ArgumentError, StateError

_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)


def unwrapped(thing: Any) -> Any:
    """A module without DDP and torch.compile around it, so that its parameters have their own names."""
    inner = uncompiled(thing)
    return inner.module if isinstance(inner, DistributedDataParallel) else inner


def copied(name: str, state: Any) -> Any:
    """A copy on the CPU, which training does not change; of a DTensor, of this rank's part.

    Raises:
        ArgumentError: it holds what `torch.load(weights_only=True)` would refuse to read.
    """
    kind = type(state)
    if isinstance(state, Tensor):
        return local(state).detach().to("cpu", copy=True)
    if kind in (dict, OrderedDict, Counter):
        new: Any = kind()
        new.update({copied(name, key): copied(name, value) for key, value in state.items()})
        if hasattr(state, "_metadata"):  # a module's: the versions of its parts
            new._metadata = dict(state._metadata)
        return new
    if kind in (list, tuple, set, torch.Size):
        return kind(copied(name, value) for value in state)
    if kind in _PLAIN:
        return state
    raise ArgumentError(
        f"{name} must hold numbers, strings, tensors, dicts and lists alone, or have state_dict(), so that "
        f"torch.load(weights_only=True) can read it, got {kind.__name__}"
    )


def meshes_of(thing: Any, state: Any) -> list[Any]:
    """The meshes that a thing's DTensors are on, with their placements, each once; none if it has none."""
    if isinstance(thing, ExchangeBase):  # whose state holds this rank's parts as plain tensors
        return ["the replicas'"] if thing.is_sharded else []
    found: list[Any] = []
    if isinstance(state, Tensor):
        whole: Any = state
        found = [[whole.device_mesh.mesh.tolist(), str(whole.placements)]] if is_dtensor(state) else []
    elif isinstance(state, (dict, list, tuple)):
        for value in state.values() if isinstance(state, dict) else state:
            found += [mesh for mesh in meshes_of(None, value) if mesh not in found]
    return found


def fitting(name: str, module: nn.Module, saved: Any) -> dict[str, Any]:
    """A saved state as this module's: this rank's parts become DTensors again.

    Raises:
        StateError: it is another module's.
    """
    mine = module.state_dict()
    shapes, theirs = (
        {key: tuple(local(t).shape) if isinstance(t, Tensor) else None for key, t in state.items()}
        for state in (mine, saved)
    )
    for key in {**shapes, **theirs}:
        if key not in shapes or key not in theirs or shapes[key] != theirs[key]:
            expected, found = shapes.get(key, "nothing"), theirs.get(key, "nothing")
            raise StateError(
                f"{name} of the checkpoint must be this model's: {key!r} is {expected}, got {found}"
            )
    for key, value in mine.items():
        if is_dtensor(value):
            saved[key] = like(saved[key].to(local(value).device), value)
    result: dict[str, Any] = saved
    return result


def check_optimizer(name: str, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Refuse another optimizer's state."""
    mine, theirs = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if mine != theirs:
        raise StateError(f"{name} of the checkpoint must have groups of {mine} parameters, got {theirs}")


@dataclass
class Copies:
    """What a rank writes: its own, and what all have the same if it is the one to write that."""

    own: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    shared_names: list[str] = field(default_factory=list)
    meshes: dict[str, Any] = field(default_factory=dict)


def copies_of(things: dict[str, Any], *, writes_shared: bool) -> Copies:
    """Copies of all that a rank writes of these things."""
    copies = Copies()
    for name, thing in things.items():
        thing = unwrapped(thing)
        state = thing.state_dict() if hasattr(thing, "state_dict") else thing
        meshes = meshes_of(thing, state)
        if meshes:
            copies.meshes[name] = meshes
        if not isinstance(thing, (nn.Module, Optimizer)) or meshes:
            copies.own[name] = copied(name, state)
            continue
        copies.shared_names.append(name)
        if writes_shared:
            copies.shared[name] = copied(name, state)
    return copies
