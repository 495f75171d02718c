"""Parameters that are exchanged together: their gradients as one vector, and their state, by their names."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from regtopk import kernels
from regtopk.algorithms.dense import Dense
from regtopk.core.algorithm import Algorithm
from regtopk.core.owners import owed_by, owed_to
from regtopk.core.precision import initial_state
from regtopk.core.state import State, accumulation_dtype
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.distributed.state.parameters import Parameters

Names = tuple[str, ...]
Entries = dict[str, dict[str, Tensor]]  # parameter name -> state field -> that parameter's part of it
# What is done with a vector of some parameters, by name; it is zero outside of its support, if it has one.
Write = Callable[[Names, Tensor, kernels.Support | None], None]


class ByName(dict[str, Tensor]):
    """Tensors by name. Those of a bucket are put in a row once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._rows: dict[Names, kernels.Pieces] = {}

    def row(self, names: Names) -> kernels.Pieces:
        """The tensors of a bucket's names."""
        if names not in self._rows:
            self._rows[names] = kernels.Pieces(map(self.__getitem__, names))
        return self._rows[names]


def flat_dtype(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """What a flat gradient of these parameters is kept in: at least float32."""
    return reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)


def as_flat(grads: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The gradients as one vector, without a copy, if they lie one after another in memory."""
    first, numel = grads[0], 0
    start = first.data_ptr()
    for grad in grads:
        is_next = grad.data_ptr() == start + numel * dtype.itemsize
        if not is_next or grad.dtype != dtype or not grad.is_contiguous():
            return None
        numel += grad.numel()
    storage = first.untyped_storage()
    is_one = start + numel * dtype.itemsize <= storage.data_ptr() + storage.nbytes()
    return first.as_strided((numel,), (1,)) if is_one else None


def into(targets: Mapping[str, Tensor], write: Callable[..., None] | None = None) -> Write:
    """Write into the tensors of some names; or `subtract_` from them."""
    write, by_name = write or write_, targets if isinstance(targets, ByName) else ByName(targets)
    return lambda names, *vector: write(by_name.row(names), *vector)


def write_(tensors: list[Tensor], vector: Tensor, support: kernels.Support | None = None) -> None:
    """Write a vector into tensors, one after another; it is zero outside of its support, if there is one."""
    if support is None:
        torch._foreach_copy_(tensors, kernels.parts_of(vector, tensors))
        return
    flat = as_flat(tensors, vector.dtype)
    kernels.spread_(tensors if flat is None else [flat], vector, support)


def subtract_(tensors: list[Tensor], vector: Tensor, support: kernels.Support | None = None) -> None:
    """Subtract a vector from tensors, one after another; it is zero outside of its support."""
    flat = as_flat(tensors, vector.dtype)
    if support is None or flat is None:
        torch._foreach_sub_(tensors, kernels.parts_of(vector, tensors))
    else:
        indices = support.indices.flatten()  # an entry named twice gets the same difference twice
        difference = flat.index_select(0, indices).sub_(vector.index_select(0, indices))
        flat.scatter_(0, indices, difference)


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
        """Copy the state, for `Step.take_back`."""
        self.state_before = self.state.clone()

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
