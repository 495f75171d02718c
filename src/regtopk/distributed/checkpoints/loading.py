"""One checkpoint on its way from its files into modules, optimizers and exchanges, on any number of ranks."""

import io
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from regtopk.distributed.checkpoints.choice import Seen
from regtopk.distributed.checkpoints.copies import fit_, meshes_of, unwrapped
from regtopk.distributed.checkpoints.files import read_checked
from regtopk.distributed.state.saved import merge_state_dicts
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.steps.handshake import together
from regtopk.distributed.transport.collectives import Collectives
from regtopk.distributed.updates.notices import ReadNotice
from regtopk.distributed.updates.saved import shard_state
from regtopk.errors import StateError


class Loading:
    """A load of one checkpoint on one rank: from the parts that any rank sees into things, by name."""

    def __init__(self, collectives: Collectives, folder: Path, found: Seen, things: dict[str, Any]) -> None:
        self._collectives = collectives
        self._folder = folder
        self._found = found
        self._things = {name: unwrapped(thing) for name, thing in things.items()}
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
        with together(self._collectives, "load the checkpoint", StateError), ReadNotice.silent():
            self._check_meshes()
            state = self._state(files)
            for name, thing in self._things.items():
                fit_(name, thing, state[name])
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
        """Refuse a sharded model on another mesh than the one it was saved on."""
        facts, num_ranks = self._found.parts[self._source], self._collectives.num_workers
        for name, saved in facts.meshes.items():
            thing = self._things.get(name)
            mine = meshes_of(thing, thing.state_dict()) if isinstance(thing, nn.Module) else saved
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
