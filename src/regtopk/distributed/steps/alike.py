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

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        first = buckets[0].worker
        weight, index = first.weight.view(1, 1), first.index.view(1, 1)
        self.of = first
        self.worker = replace(first, weight=weight, index=index, batch_shape=(len(buckets), 1))
        self.sums = SumBuffer()
        self._state: Any = None
        self._views: dict[str, tuple[Tensor, ...]] = {}
        self._seen: dict[str, Tensor] = {}  # whose rows the views are

    def state_of(self, buckets: Sequence[Bucket]) -> State:
        """The states as one; a field is copied only if somebody has put other tensors in its place."""
        fields = {}
        for name in buckets[0].state.rules():
            tensors = [getattr(bucket.state, name) for bucket in buckets]
            views = self._views.get(name, ())
            is_same = len(views) > 0 and all(map(operator.is_, tensors, views))
            fields[name] = getattr(self._state, name) if is_same else torch.stack(tensors).unsqueeze(1)
            if not is_same:
                self._show(name, fields[name], buckets)  # one by one: old tensors are let go of at once
        self._state = type(buckets[0].state)(**fields)
        state: State = self._state
        return state

    def show(self, buckets: Sequence[Bucket]) -> None:
        """Let the buckets see what became of their states."""
        for name in self._state.rules():
            self._show(name, getattr(self._state, name), buckets)

    def _show(self, name: str, field: Tensor, buckets: Sequence[Bucket]) -> None:
        if self._seen.get(name) is field:
            return
        self._seen[name], self._views[name] = field, field.squeeze(1).unbind()
        for bucket, view in zip(buckets, self._views[name], strict=True):
            setattr(bucket.state, name, view)


class Alike:
    """Finds out which buckets are alike, and remembers their rows from step to step."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Any, ...], Rows] = {}
        self._asked: tuple[list[Bucket], list[Bucket]] = [], []  # for the groups of the last step
        self._groups: list[list[int]] = []

    def groups(self, everyone: Sequence[Bucket], buckets: Sequence[Bucket]) -> list[list[int]]:
        """Which of the buckets of a step are computed together, in the order of the first of each group.

        Buckets that are alike are computed together only if all of them take part in the step: rows of some
        would be copied, and the others would keep the memory of all.
        """
        if self._asked == (everyone, buckets):
            return self._groups  # their states have changed alike
        num_alike = Counter(map(_kind_of, everyone))
        kinds: dict[Any, list[int]] = {}
        for place, bucket in enumerate(buckets):
            kinds.setdefault(_kind_of(bucket) or place, []).append(place)
        groups = []
        for kind, places in kinds.items():
            groups += [places] if num_alike[kind] == len(places) else [[place] for place in places]
        num_kinds = len({kind[:-1] if isinstance(kind, tuple) else kind for kind in kinds})
        is_final = len(groups) == num_kinds  # some may not be alike for their sizes alone, which change
        self._asked = (list(everyone), list(buckets)) if is_final else ([], [])
        self._groups = groups
        return groups

    def rows_of(self, buckets: Sequence[Bucket]) -> Rows:
        """What makes these buckets one; the same as in the last step, if that computed them together."""
        names = tuple(bucket.names for bucket in buckets)
        rows = self._rows.get(names)
        if rows is None or rows.of is not buckets[0].worker:
            self._rows = {  # a bucket is in one place alone
                theirs: others for theirs, others in self._rows.items() if not set(theirs) & set(names)
            }
            rows = self._rows[names] = Rows(buckets)
        for bucket in buckets:
            bucket.sums.spare = bucket.sums.total = None  # memory of steps that it made alone
        return rows


def _kind_of(bucket: Bucket) -> Any:
    """Equal for buckets that can be computed together; None if it can be with no other.

    All that the algorithm asks for must be one sum of equally long messages, and nothing of its state may be
    shared by ranks, which has no row for each bucket.
    """
    promises, state = bucket.algorithm.promises, bucket.state
    if not {"one_sum", "replicates"} <= promises or "shared" in state.rules().values():
        return None
    shapes = tuple((layer.shape, layer.kind) for layer in bucket.layout.layers)
    sizes = tuple(tensor.shape for tensor in state.state_dict().values())
    return id(bucket.algorithm), type(state), shapes, bucket.worker.weight.dtype, sizes
