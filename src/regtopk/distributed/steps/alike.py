"""Buckets that are alike are computed together: the units of a sharded model are mostly blocks of one shape.

U buckets of equal layout are U independent clusters to an algorithm, as in the simulator: every tensor has a
row for each, (U, 1, m). So a selection of all of them takes as many operations as one.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regtopk.core.state import State
from regtopk.distributed.requests.rank import SumBuffer
from regtopk.distributed.state.buckets import Bucket


class Rows:
    """The states of buckets that are alike, as one: each bucket's tensors are views of a row."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        first = buckets[0].worker
        weight, index = first.weight.view(1, 1), first.index.view(1, 1)
        self.worker = replace(first, weight=weight, index=index, batch_shape=(len(buckets), 1))
        self.sums = SumBuffer()
        self._fields: dict[str, Tensor] = {}
        self._views: dict[str, tuple[Tensor, ...]] = {}  # the fields' rows, as the buckets have them

    def state(self) -> State:
        """The states as one; a field is copied only if somebody has put other tensors in its place."""
        kind = type(self.buckets[0].state)
        for name in kind.rules():
            tensors = [getattr(bucket.state, name) for bucket in self.buckets]
            if name not in self._views or not all(map(operator.is_, tensors, self._views[name])):
                self._show(name, torch.stack(tensors).unsqueeze(1))  # one by one: old tensors go at once
        return kind(**self._fields)

    def show(self, state: State) -> None:
        """Let the buckets see what became of their states."""
        for name, field in state.state_dict().items():
            if self._fields[name] is not field:
                self._show(name, field)

    def _show(self, name: str, field: Tensor) -> None:
        self._fields[name], self._views[name] = field, field.squeeze(1).unbind()
        for bucket, view in zip(self.buckets, self._views[name], strict=True):
            setattr(bucket.state, name, view)


class Alike:
    """Finds out which buckets are alike, and remembers their rows from step to step."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Any, ...], Rows] = {}
        self._asked: Any = None  # what the groups of the last step were found for
        self._groups: list[list[int]] = []

    def groups(self, everyone: Sequence[Bucket], buckets: Sequence[Bucket]) -> list[list[int]]:
        """Which of the buckets of a step are computed together, in the order of the first of each group.

        Buckets that are alike are computed together only if all of them take part in the step: rows of some
        would be copied, and the others would keep the memory of all.
        """
        asked = list(everyone), list(buckets), [_sizes_of(bucket) for bucket in everyone]
        if asked != self._asked:
            num_alike = Counter(map(_kind_of, everyone))
            kinds: dict[Any, list[int]] = {}
            for place, bucket in enumerate(buckets):
                kinds.setdefault(_kind_of(bucket) or place, []).append(place)
            self._asked, self._groups = asked, []
            for kind, places in kinds.items():
                are_all = num_alike[kind] == len(places)
                self._groups += [places] if are_all else [[place] for place in places]
        return self._groups

    def rows_of(self, buckets: list[Bucket]) -> Rows:
        """What makes these buckets one; the same as in the last step, if that computed them together."""
        names = tuple(bucket.names for bucket in buckets)
        if names not in self._rows or self._rows[names].buckets != buckets:
            self._rows = {  # a bucket is in one place alone
                theirs: others for theirs, others in self._rows.items() if not set(theirs) & set(names)
            }
            self._rows[names] = Rows(buckets)
        for bucket in buckets:
            bucket.sums.spare = bucket.sums.total = None  # memory of steps that it made alone
        return self._rows[names]


def _kind_of(bucket: Bucket) -> Any:
    """Equal for buckets that can be computed together; None if it can be with no other.

    All that the algorithm asks for must be one sum of equally long messages, and nothing of its state may be
    shared by ranks, which has no row for each bucket.
    """
    promises, state = bucket.algorithm.promises, bucket.state
    if not {"one_sum", "replicates"} <= promises or "shared" in state.rules().values():
        return None
    shapes = tuple((layer.shape, layer.kind) for layer in bucket.layout.layers)
    return id(bucket.algorithm), type(state), shapes, bucket.worker.weight.dtype, _sizes_of(bucket)


def _sizes_of(bucket: Bucket) -> tuple[torch.Size, ...]:
    """Those of its state, which a step may change."""
    return tuple(tensor.shape for tensor in bucket.state.state_dict().values())
