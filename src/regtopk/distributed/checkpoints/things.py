"""Things that checkpoints hold: copied when they are saved, and given back on any number of ranks."""

import io
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from regtopk.distributed.checkpoints.choice import Seen
from regtopk.distributed.checkpoints.files import read_checked
from regtopk.distributed.state.parameters import is_dtensor, uncompiled
from regtopk.distributed.state.saved import merge_state_dicts
from regtopk.distributed.state.shards import copied, like, local, shapes_of
from regtopk.distributed.steps.attached import Notices
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.steps.handshake import together
from regtopk.distributed.transport.collectives import Collectives
from regtopk.distributed.updates.saved import shard_state
from regtopk.errors import ArgumentError, StateError

_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)


def _unwrapped(thing: Any) -> Any:
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


def _meshes_of(thing: Any, state: Any) -> list[Any]:
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


def copies_of(things: dict[str, Any], *, writes_shared: bool) -> tuple[dict[str, Any], ...]:
    """By name: copies of this rank's own, of what all have the same (None if others write it), and meshes."""
    own, shared, meshes = {}, {}, {}
    for name, thing in things.items():
        thing = _unwrapped(thing)
        state = thing.state_dict() if hasattr(thing, "state_dict") else thing
        if found := _meshes_of(thing, state):
            meshes[name] = found
        check = partial(_check_plain, name)
        if isinstance(thing, (nn.Module, Optimizer)) and not found:
            shared[name] = copied(state, check) if writes_shared else None
        else:
            own[name] = copied(state, check)
    return own, shared, meshes


class Loading:
    """A load of one checkpoint on one rank: from the parts that any rank sees into things, by name."""

    def __init__(self, collectives: Collectives, folder: Path, found: Seen, things: dict[str, Any]) -> None:
        self._collectives = collectives
        self._folder = folder
        self._found = found
        self._things = {name: _unwrapped(thing) for name, thing in things.items()}
        self._lost = found.missing
        rank, ranks = collectives.rank, sorted(found.parts)
        self._source = rank if rank in ranks else ranks[rank % len(ranks)]  # whose own values this rank takes
        self._exchanges: dict[str, ExchangeBase] = {
            name: thing for name, thing in self._things.items() if isinstance(thing, ExchangeBase)
        }
        self._resized = [  # the exchanges that were saved by other ranks, or with other weights
            name
            for name, thing in self._exchanges.items()
            if not thing.is_sharded and (self._lost or found.facts.weights.get(name) != thing.weights)
        ]
        self.told: list[str] = []  # what to log

    def read(self, seen: list[Seen]) -> dict[str, bytes] | None:
        """The files that this rank needs, sent by others that see them; None if one is damaged."""
        ask, rank = self._collectives.all_gather_objects, self._collectives.rank
        visible = [{name for part in theirs.parts.values() for name in part.files} for theirs in seen]
        ranks = self._found.parts if self._resized else [self._source]  # all, if the ranks are others now
        shared = sorted(self._found.shared_files, key=lambda name: name not in visible[rank])
        wanted = {*(f"rank-{n}.pt" for n in ranks), *shared[:1]}
        asked = sorted(set().union(*ask(wanted - visible[rank])))
        written = {name: how for part in self._found.parts.values() for name, how in part.files.items()}
        files = {name: read_checked(self._folder / name, *written[name]) for name in wanted & visible[rank]}
        for name in asked:
            sender = next(n for n, names in enumerate(visible) if name in names)
            data = read_checked(self._folder / name, *written[name]) if rank == sender else b""
            data = ask(data)[sender]
            if name in wanted:
                files[name] = data
        if asked:
            self.told.append(f"some ranks do not see {asked} in {self._folder}, so they were sent them")
        return None if any(ask(b"" in files.values())) else files

    def take_over(self, files: dict[str, bytes]) -> dict[str, Any]:
        """Give things their states, once all fit on every rank; returns what no thing was named for."""
        with together(self._collectives, "load the checkpoint", StateError), Notices.silent():
            self._check_meshes()
            state = self._state(files)
            for name, thing in self._things.items():
                _fit_(name, thing, state[name])
            loaded = {name: exchange._loaded(state[name]) for name, exchange in self._exchanges.items()}
        for name, exchange in self._exchanges.items():
            with together(self._collectives, "load the checkpoint", StateError):
                exchange._compare_loaded(loaded[name])
        for name, thing in self._things.items():
            if name not in loaded:
                thing.load_state_dict(state[name])
            if isinstance(thing, Optimizer) and name in self._found.facts.meshes:
                shard_state(thing)
        for name, exchange in self._exchanges.items():  # last: that of updates sets its model and optimizer
            exchange._go_on_from(loaded[name])
            self._count_lost(name, exchange)
        return {name: each for name, each in state.items() if name not in self._things}

    def _check_meshes(self) -> None:
        facts, num_ranks = self._found.parts[self._source], self._collectives.num_workers
        for name, saved in facts.meshes.items():
            thing = self._things.get(name)
            mine = _meshes_of(thing, thing.state_dict()) if isinstance(thing, nn.Module) else saved
            if facts.num_ranks != num_ranks or mine != saved:
                raise StateError(
                    f"{name} must be loaded on the mesh of its shards, {saved} of {facts.num_ranks} ranks, "
                    f"got {mine} of {num_ranks}: torch.distributed.checkpoint (DCP) can change the mesh"
                )

    def _state(self, files: dict[str, bytes]) -> dict[str, Any]:
        """By name, what this rank loads."""
        contents = {
            name: torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
            for name, data in files.items()
        }
        state = dict(contents[f"rank-{self._source}.pt"])
        for name in self._found.shared_files:
            state |= contents.get(name, {})
        if unknown := sorted(set(self._things) - set(state)):
            raise StateError(f"the checkpoint must hold {unknown}, got {sorted(state)}")
        for name in self._resized:
            parts = [contents[f"rank-{n}.pt"][name] for n in sorted(self._found.parts)]
            state[name] = merge_state_dicts(parts) | ({"lost": self._lost} if self._lost else {})
        return state

    def _count_lost(self, name: str, exchange: ExchangeBase) -> None:
        """Say what became of the residuals of ranks that are gone."""
        facts = self._found.facts
        if self._lost:
            norms = [w * norm for w, norm in zip(facts.weights[name], facts.norms[name], strict=True)]
            lost = sum(norms[rank] for rank in self._lost)
            share = lost / sum(norms) if lost else 0.0
            exchange._steps.ledger.lose(lost)
            self.told.append(
                f"{name} goes on without the parts of ranks {self._lost}: the weighted norms of what they "
                f"had not sent add up to {lost:.4g}, {100 * share:.1f} % of those of all ranks"
            )
        elif name in self._resized:
            before, now = facts.num_ranks, exchange.num_workers
            change = f"taken over by {now}" if before != now else "weighted anew"
            self.told.append(f"{name} of {before} ranks is {change}: no residual is lost")


def _fit_(name: str, thing: Any, saved: dict[str, Any]) -> None:
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
