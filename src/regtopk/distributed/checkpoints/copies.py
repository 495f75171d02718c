"""States that checkpoints hold: copied when they are saved, and compared with what they are loaded into."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from regtopk.distributed.state.parameters import is_dtensor, uncompiled
from regtopk.distributed.state.shards import copied, like, local, shapes_of
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.errors import ArgumentError, StateError

_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)


def unwrapped(thing: Any) -> Any:
    """A module without DDP and torch.compile around it, so that its parameters have their own names."""
    inner = uncompiled(thing)
    return inner.module if isinstance(inner, DistributedDataParallel) else inner


def _check_plain(name: str, thing: Any) -> Any:
    """The thing itself, if torch.load(weights_only=True) can read it."""
    if type(thing) in _PLAIN:
        return thing
    raise ArgumentError(
        f"{name} must hold numbers, strings, tensors, dicts and lists alone, or have state_dict(), so that "
        f"torch.load(weights_only=True) can read it, got {type(thing).__name__}"
    )


def meshes_of(thing: Any, state: Any) -> list[Any]:
    """The meshes that a thing's DTensors are on, with their placements, each once; none if it has none."""
    if isinstance(thing, ExchangeBase):  # whose state holds this rank's parts as plain tensors
        return ["the replicas'"] if thing.is_sharded else []
    found: list[Any] = []
    for leaf in tree_leaves(state):
        if isinstance(leaf, Tensor) and is_dtensor(leaf):
            whole: Any = leaf
            mesh = [whole.device_mesh.mesh.tolist(), str(whole.placements)]
            found += [mesh] if mesh not in found else []
    return found


def fit_(name: str, thing: Any, saved: dict[str, Any]) -> None:
    """Refuse a state of another module or optimizer. This rank's parts of DTensors become DTensors again."""
    if isinstance(thing, Optimizer):
        groups = thing.param_groups, saved["param_groups"]
        mine, theirs = ([len(group["params"]) for group in each] for each in groups)
        if mine != theirs:
            raise StateError(f"{name} of the checkpoint must have groups of {mine} parameters, got {theirs}")
    if isinstance(thing, nn.Module):
        state = thing.state_dict()
        expected, found = shapes_of(state), shapes_of(saved)
        for key in {**expected, **found}:
            shape, got = expected.get(key, "nothing"), found.get(key, "nothing")
            if shape != got:
                raise StateError(
                    f"{name} of the checkpoint must be this model's: {key!r} is {shape}, got {got}"
                )
            if shape is not None and is_dtensor(state[key]):
                saved[key] = like(saved[key].to(local(state[key]).device), state[key])


def copies_of(things: dict[str, Any], *, writes_shared: bool) -> tuple[dict[str, Any], ...]:
    """By name: copies of this rank's own, of what all have the same (None if others write it), and meshes."""
    own, shared, meshes = {}, {}, {}
    for name, thing in things.items():
        thing = unwrapped(thing)
        state = thing.state_dict() if hasattr(thing, "state_dict") else thing
        if found := meshes_of(thing, state):
            meshes[name] = found
        check = partial(_check_plain, name)
        if isinstance(thing, (nn.Module, Optimizer)) and not found:
            shared[name] = copied(state, check) if writes_shared else None
        else:
            own[name] = copied(state, check)
    return own, shared, meshes
