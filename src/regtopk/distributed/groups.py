"""Parameters that are exchanged together, and their state.

State follows parameters by name. DDP may put them into other buckets from one step to the next; then groups
are cut anew, per-entry state goes along with its parameters, and what only meant something to the old group
(the last selection) starts anew.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regtopk.core.algorithm import Algorithm
from regtopk.core.state import State
from regtopk.core.worker import Layout, Worker

Entries = dict[str, dict[str, Tensor]]  # parameter name -> state field -> that parameter's part of it


@dataclass(eq=False)
class Group:
    """Parameters whose gradients make one flat vector, in this order.

    Touching new memory of the vector's size costs more than most that is done with it. So what a step no
    longer needs is kept for the next: the vector itself, the aggregate, and the state taken back to.
    """

    names: tuple[str, ...]
    layout: Layout
    algorithm: Algorithm[Any]
    worker: Worker
    state: State
    flat: Tensor | None = None
    room: Tensor | None = None
    state_before: State | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What the vector is kept in."""
        return self.worker.weight.dtype

    def remember_state(self) -> None:
        """Copy the state, for `take_back_state`."""
        self.state_before = self.state.copy_into(self.state_before)

    def take_back_state(self) -> None:
        """Make the state what it was when it was last remembered."""
        assert self.state_before is not None
        self.state, self.state_before = self.state_before, None

    def recycle(self, aggregate: Tensor, flat: Tensor) -> None:
        """Let the next aggregate be written over this one, unless the state or the vector is there."""
        in_use = {_memory(tensor) for tensor in (flat, *self.state.state_dict().values())}
        self.room = None if _memory(aggregate) in in_use else aggregate

    def entries(self) -> Entries:
        """The per-entry state, cut by parameter (views)."""
        return {
            layer.name: {
                field: getattr(self.state, field)[layer.start : layer.start + layer.numel]
                for field in self.entry_fields()
            }
            for layer in self.layout.layers
        }

    def entry_fields(self) -> list[str]:
        """State fields with one number for each entry of the vector."""
        return self.state.per_entry_fields()

    def other_fields(self) -> dict[str, Tensor]:
        """State fields that belong to the group as a whole."""
        per_entry = self.entry_fields()
        return {name: t for name, t in self.state.state_dict().items() if name not in per_entry}

    def load(self, entries: Entries, others: dict[str, Tensor] | None) -> None:
        """Take over per-entry state by parameter, and the rest if it is known (else it starts anew)."""
        for field in self.entry_fields():
            own = getattr(self.state, field)
            parts = [entries[name][field].flatten() for name in self.names]
            setattr(self.state, field, torch.cat(parts).to(own))
        for field, saved in (others or {}).items():
            own = getattr(self.state, field)
            setattr(self.state, field, saved.to(device=own.device, dtype=own.dtype, copy=True))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Groups:
    """All groups of an exchange, in the order they are exchanged."""

    def __init__(self, make: Callable[[tuple[str, ...]], Group], parts: Iterable[tuple[str, ...]]) -> None:
        self.make = make
        self.groups = [make(part) for part in parts if part]

    def covering(
        self, names: tuple[str, ...], cut: Callable[[tuple[str, ...]], list[tuple[str, ...]]]
    ) -> list[Group]:
        """The groups that hold exactly these parameters; groups that hold some of them are cut anew.

        Args:
            names: parameters that arrived together (a DDP bucket).
            cut: how such parameters are divided into groups.
        """
        wanted = set(names)
        touched = [group for group in self.groups if wanted.intersection(group.names)]
        if all(wanted.issuperset(group.names) for group in touched):
            return touched
        return self._regroup(touched, names, cut)

    def _regroup(
        self,
        touched: list[Group],
        names: tuple[str, ...],
        cut: Callable[[tuple[str, ...]], list[tuple[str, ...]]],
    ) -> list[Group]:
        entries: Entries = {}
        for group in touched:
            entries.update(group.entries())
        new = [self.make(part) for part in cut(names) if part]
        left = [tuple(n for n in group.names if n not in set(names)) for group in touched]
        rest = [self.make(part) for part in left if part]
        for group in (*new, *rest):
            group.load(entries, None)
        untouched = [group for group in self.groups if group not in touched]
        self.groups = [*untouched, *new, *rest]
        return new

    def residual_norm(self) -> float:
        """The Euclidean norm of all that this rank has not sent yet."""
        states = [group.state.state_dict() for group in self.groups]
        norms = [torch.linalg.vector_norm(state["residual"]) for state in states if "residual" in state]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
