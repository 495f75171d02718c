"""One checkpoint on its way from its files into modules, optimizers and exchanges, on any number of ranks."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from regtopk.distributed.checkpoints.choice import Whole, lost_residual, missing, shared_files
from regtopk.distributed.checkpoints.copies import check_optimizer, fitting, meshes_of, unwrapped
from regtopk.distributed.checkpoints.files import content_of, read_checked
from regtopk.distributed.state.saved import merge_state_dicts
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.transport.collectives import Collectives
from regtopk.distributed.updates.saved import shard_state
from regtopk.errors import RegtopkError, StateError


def raise_together(
    collectives: Collectives, error: Exception | None, act: str, kind: type[RegtopkError]
) -> None:
    """Raise this rank's error, or another rank's: none may go on alone. Call it on every rank."""
    told = None if error is None else f"{type(error).__name__}: {error}"
    errors = collectives.all_gather_objects(told)
    if error is not None:
        raise error
    for rank, theirs in zip(collectives.ranks, errors, strict=True):
        if theirs is not None:
            raise kind(f"rank {rank} cannot {act}: {theirs}")


class Loading:
    """A load of one checkpoint on one rank: from the parts that any rank sees into things, by name."""

    def __init__(self, collectives: Collectives, folder: Path, parts: Whole, things: dict[str, Any]) -> None:
        self._collectives = collectives
        self._folder = folder
        self._parts = parts
        self._things = {name: unwrapped(thing) for name, thing in things.items()}
        ranks = sorted(parts)
        rank = collectives.rank
        self._source = rank if rank in parts else ranks[rank % len(ranks)]  # whose own values this rank takes
        self._lost = missing(parts)
        self._exchanges: dict[str, ExchangeBase] = {
            name: thing for name, thing in self._things.items() if isinstance(thing, ExchangeBase)
        }
        weights = parts[self._source].weights
        self._resized = [  # the exchanges that were saved by other ranks, or with other weights
            name
            for name, thing in self._exchanges.items()
            if not thing.is_sharded and (self._lost or weights.get(name) != thing.weights)
        ]
        self.told: list[str] = []  # what to log

    def read(self, seen: list[Whole]) -> dict[str, bytes] | None:
        """The files that this rank needs, sent by others that see them; None if one is damaged."""
        ask, rank = self._collectives.all_gather_objects, self._collectives.rank
        here = {name for part in seen[rank].values() for name in part.files}
        wanted = self._wanted(here)
        asked = sorted(set().union(*ask([name for name in wanted if name not in here])))
        owners = {name: owner for owner, part in self._parts.items() for name in part.files}
        senders = {name: next(r for r, theirs in enumerate(seen) if owners[name] in theirs) for name in asked}
        to_send = [name for name in asked if senders[name] == rank]
        files = {
            name: read_checked(self._folder / name, self._parts[owners[name]])
            for name in {*wanted, *to_send} & here
        }
        if asked:
            self.told.append(f"some ranks do not see {asked} in {self._folder}, so they were sent them")
            for sent in ask({name: files[name] for name in to_send}):
                files |= sent
        if any(ask(None in files.values())):
            return None
        return {name: data for name, data in files.items() if name in wanted and data is not None}

    def _wanted(self, here: set[str]) -> list[str]:
        """The files that this rank needs: its own, all parts if the ranks are others, and what is shared."""
        ranks = sorted(self._parts) if self._resized else [self._source]
        shared = sorted(shared_files(self._parts), key=lambda name: name not in here)
        return [f"rank-{n}.pt" for n in ranks] + shared[:1]

    def take_over(self, files: dict[str, bytes]) -> dict[str, Any]:
        """Give things their states, once all of them fit; returns what no thing was named for.

        Raises:
            StateError: a state does not fit, on this rank or on another; nothing was changed on any.
        """
        error: StateError | None = None
        state: dict[str, Any] = {}
        loaded: dict[str, Any] = {}
        try:
            self._check_meshes()
            state = self._state(files)
            loaded = self._checked(state)
        except StateError as problem:
            error = problem
        raise_together(self._collectives, error, "load the checkpoint", StateError)
        for name, thing in self._things.items():
            if name in loaded:
                continue
            thing.load_state_dict(state[name])
            if isinstance(thing, Optimizer) and name in self._parts[self._source].meshes:
                shard_state(thing)
        for name, exchange in self._exchanges.items():  # last: that of updates sets its model and optimizer
            exchange._go_on_from(loaded[name])
            self._count_lost(name, exchange)
        return {name: each for name, each in state.items() if name not in self._things}

    def _check_meshes(self) -> None:
        """Refuse a sharded model on another mesh than the one it was saved on."""
        facts, num_ranks = self._parts[self._source], self._collectives.num_workers
        for name, saved in facts.meshes.items():
            thing = self._things.get(name)
            mine = meshes_of(thing, thing.state_dict()) if isinstance(thing, nn.Module) else saved
            if facts.num_ranks != num_ranks or mine != saved:
                raise StateError(
                    f"{name} is sharded and must be loaded on the mesh that it was saved on, {saved} of "
                    f"{facts.num_ranks} ranks, got {mine} of {num_ranks}: save and load by "
                    "torch.distributed.checkpoint (DCP) to change the mesh"
                )

    def _state(self, files: dict[str, bytes]) -> dict[str, Any]:
        """By name, what this rank loads."""
        contents = {name: content_of(data) for name, data in files.items()}
        state = dict(contents[f"rank-{self._source}.pt"])
        for name in shared_files(self._parts):
            state |= contents.get(name, {})
        unknown = sorted(set(self._things) - set(state))
        if unknown:
            raise StateError(f"the checkpoint must hold {unknown}, got {sorted(state)}")
        for name in self._resized:
            state[name] = merge_state_dicts([contents[f"rank-{n}.pt"][name] for n in sorted(self._parts)])
            state[name] |= {"lost": self._lost} if self._lost else {}
        return state

    def _checked(self, state: dict[str, Any]) -> dict[str, Any]:
        """By name, what exchanges go on from; all other states are checked, and modules' made to fit."""
        loaded = {name: exchange._loaded(state[name]) for name, exchange in self._exchanges.items()}
        for name, thing in self._things.items():
            if isinstance(thing, nn.Module):
                state[name] = fitting(name, thing, state[name])
            elif isinstance(thing, Optimizer):
                check_optimizer(name, thing, state[name])
        return loaded

    def _count_lost(self, name: str, exchange: ExchangeBase) -> None:
        if self._lost:
            norm, share = lost_residual(self._parts, name)
            exchange._lose(norm)
            self.told.append(
                f"{name} goes on without the parts of ranks {self._lost}: the weighted norms of what they "
                f"had not sent add up to {norm:.4g}, {100 * share:.1f} % of those of all ranks"
            )
        elif name in self._resized:
            self.told.append(
                f"{name} was saved by {self._parts[self._source].num_ranks} ranks and goes on on "
                f"{exchange.num_workers}, or with other weights: no residual is lost"
            )
