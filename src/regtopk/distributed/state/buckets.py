"""Parameters that are exchanged together, and their state, which follows parameters by name."""

import dataclasses
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.algorithms.dense import Dense
from regtopk.core.algorithm import Algorithm
from regtopk.core.owners import owed_by, owed_to
from regtopk.core.precision import initial_state
from regtopk.core.state import State, accumulation_dtype
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.distributed.state.layout import ByName, as_flat, flat_dtype
from regtopk.distributed.state.parameters import Parameters

Names = tuple[str, ...]
Entries = dict[str, dict[str, Tensor]]  # parameter name -> state field -> that parameter's part of it


@dataclass(eq=False)
class Bucket:
    """Parameters whose gradients make one flat vector, in this order.

    New memory of the vector's size costs more than most of the work on it. So a step keeps what it no longer
    needs for the next one: the vector itself, and the aggregate (in `sums`).
    """

    names: Names
    algorithm: Algorithm[Any]
    worker: Worker
    state: State
    flat: Tensor | None = None
    sums: SumBuffer = dataclasses.field(default_factory=SumBuffer)
    state_before: State | None = None  # before a step that may still be taken back

    @property
    def layout(self) -> Layout:
        """Where each parameter is in the vector."""
        return self.worker.layout

    @property
    def settled_state(self) -> State:
        """The state after the last step that was finished."""
        return self.state if self.state_before is None else self.state_before

    def keep_state(self) -> None:
        """Copy the state, for `take_back`."""
        self.state_before = self.state.clone()

    def take_back(self) -> None:
        """Go back to the settled state."""
        self.state, self.state_before = self.settled_state, None

    def join(self, grads: ByName) -> tuple[Tensor, Tensor | None]:
        """The gradients as one vector, in at least float32; and whether it is finite, if they were copied."""
        tensors = grads.row(self.names)
        flat = as_flat(tensors, self.worker.weight.dtype)
        if flat is not None:
            return flat, None
        self.flat = self.worker.zeros() if self.flat is None else self.flat
        return self.flat, kernels.join_(self.flat, tensors)

    def entries(self) -> Entries:
        """The per-entry state, cut by parameter, in its shape (views)."""
        layers = self.layout.layers
        entries: Entries = {layer.name: {} for layer in layers}
        for field in self.state.per_entry_fields():
            parts = getattr(self.settled_state, field).split([layer.numel for layer in layers])
            for layer, part in zip(layers, parts, strict=True):
                entries[layer.name][field] = part.view(layer.shape)
        return entries

    def other_fields(self) -> dict[str, Tensor]:
        """State fields that belong to the bucket as a whole."""
        per_entry = self.state.per_entry_fields()
        return {name: t for name, t in self.settled_state.state_dict().items() if name not in per_entry}

    def load(self, entries: Entries, others: dict[str, Tensor]) -> None:
        """Take over per-entry state by parameter, and those other fields that are known."""
        for field in self.state.per_entry_fields():
            parts = [entries[name][field].flatten() for name in self.names]
            setattr(self.state, field, torch.cat(parts).to(getattr(self.state, field)))
        for field, saved in others.items():
            new = getattr(self.state, field)
            setattr(self.state, field, saved.to(device=new.device, dtype=new.dtype, copy=True))


@dataclass(eq=False)
class Buckets:
    """All buckets of an exchange, in the order they are exchanged."""

    parameters: Parameters
    skipped: frozenset[str]  # the names of those that go dense
    algorithm: Algorithm[Any]
    rank: Rank
    parts: InitVar[Sequence[Names]]  # those that are exchanged together; empty: all of them

    def __post_init__(self, parts: Sequence[Names]) -> None:
        together = parts or [tuple(self.parameters.named)]
        self.all = [self.make(part) for names in together for part in self.cut(names)]

    def cut(self, names: Names) -> list[Names]:
        """Parameters that arrive together, divided into those exchanged sparsely and those sent dense."""
        named = self.parameters.named
        names = tuple(name for name in names if named[name].numel() > 0)
        sparse = tuple(name for name in names if name not in self.skipped)
        dense = tuple(name for name in names if name in self.skipped)
        return [part for part in (sparse, dense) if part]

    def make(self, names: Names) -> Bucket:
        """A bucket of these parameters, in the state of the first step."""
        rank, device, named = self.rank, self.parameters.device, self.parameters.named
        dtype = flat_dtype(named[name] for name in names)
        worker = Worker(
            weight=rank.weights[rank.index].to(device=device, dtype=dtype),
            index=torch.tensor(rank.index, device=device),
            num_workers=rank.num_workers,
            step=0,
            layout=self.parameters.layout_of(names),
            idle=rank.idle,
            index_code=rank.index_code,
        )
        if names[0] in self.skipped:
            return Bucket(names, Dense(), worker, Dense().init(worker))
        state = initial_state(self.algorithm, worker, rank.options.residual_dtype)
        return Bucket(names, self.algorithm, worker, state)

    def regroup(self, rank: Rank) -> None:
        """Go on among other ranks with its residual, and what it owed as an owner; the rest starts anew."""
        before_weights, self.rank = self.rank.weights.tolist(), rank
        old, self.all = self.all, [self.make(bucket.names) for bucket in self.all]
        for before, after in zip(old, self.all, strict=True):
            state: Any = before.settled_state
            for field, rule in state.rules().items():
                if rule == "owned":
                    place, owed, numel = int(before.worker.index), getattr(state, field), before.layout.numel
                    left = getattr(state, owed_to(state.rules()))
                    left += owed_by(place, owed, before_weights, numel)
                elif rule != "reset":
                    setattr(after.state, field, getattr(state, field))

    def shared(self) -> list[dict[str, Tensor]]:
        """What all ranks know alike, bucket by bucket (not copied)."""
        return [
            {field: t for field, t in state.state_dict().items() if state.rules()[field] == "shared"}
            for state in (bucket.settled_state for bucket in self.all)
        ]

    def begin_from(self, shared: list[dict[str, Tensor]], *, is_late: bool) -> None:
        """Begin with what all others know alike: as a new rank does, with no residual, or with its own."""
        if is_late:
            self.regroup(self.rank)
        else:
            self.all = [self.make(bucket.names) for bucket in self.all]
        for bucket, fields in zip(self.all, shared, strict=True):
            bucket.load(bucket.entries(), fields)

    def residual_norm(self) -> float:
        """The Euclidean norm of all that this rank has not sent yet, and of what it owes as an owner."""
        residuals = []
        for bucket in self.all:
            state, weight = bucket.settled_state.state_dict(), bucket.worker.weight
            residuals += [state["residual"]] if "residual" in state else []
            residuals += [state["owed"] / weight] if "owed" in state and weight > 0 else []
        norms = [torch.linalg.vector_norm(e, dtype=accumulation_dtype(e.dtype)) for e in residuals]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
