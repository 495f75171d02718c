"""Checkpoints of sharded models through torch.distributed.checkpoint (DCP).

A rank's state dict (saved.py) comes apart: what has an entry for each of a parameter's becomes a DTensor
that is cut as the parameter is, so DCP can cut it anew for another number of shards. The rest, which is
small, is kept as it is, with the tensors' dtypes in their places::

    replicas  {"0": {entries, optimizer, parameters, rest}}     what differs from replica to replica
        entries     {parameter: {field: DTensor}}       residuals, and what else an algorithm keeps
        optimizer   {parameter: {key: DTensor}}         of an `UpdateExchange`, as the following ones
        parameters  {parameter: DTensor}                only inside a round
        rest        {"1": (state dict,)}                of each part; a tuple, which DCP keeps whole
    start     {parameter: DTensor}                      theta_start, the same on all replicas
    outer     {parameter: {key: DTensor}}               the outer optimizer's state
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regtopk.core.owners import owed_to
from regtopk.distributed.state.buckets import Buckets
from regtopk.distributed.state.saved import merge_state_dicts, owed_parts
from regtopk.distributed.state.shards import like, local
from regtopk.errors import StateError

Load = Callable[[dict[str, Any]], None]  # fills in what a checkpoint holds under these keys
_place = "{} of {}".format  # which part of a model, of how many


class Piece(NamedTuple):
    """Where a parameter's part lies in one of the vectors that are exchanged."""

    vector: str
    parameter: str
    start: int


@dataclass(frozen=True)
class Sharding:
    """How the state of an exchange belongs to sharded parameters."""

    wholes: dict[str, Any]  # the DTensors, by name
    pieces: list[Piece]  # of all vectors; what lies between them is padding
    inner: tuple[str | None, ...] = ()  # the parameter of each index of the optimizer's state; None: frozen
    outer: tuple[str | None, ...] = ()  # the same of the outer optimizer


class _Slot(NamedTuple):
    """A place in a state dict for a tensor that is saved by itself, and where in the checkpoint that is."""

    holder: dict[Any, Any]
    key: Any
    path: tuple[str, ...]
    parameter: str


def under_shard(saved: dict[str, Any], shard: list[int] | None) -> dict[str, Any]:
    """A state dict whose keys are no other part's: checkpoints that merge equal keys keep every part."""
    return saved if shard is None else {"shards": {_place(*shard): saved}}


def from_shard(saved: Any, shard: list[int] | None) -> Any:
    """This part's of what `under_shard` gave, or of all parts of that."""
    if not isinstance(saved, dict):
        return saved
    if "replicas" in saved:
        raise StateError("what sharded_state_dict() gave must be loaded by load_sharded(folder)")
    parts = saved.get("shards")
    if isinstance(parts, dict):
        key = "of no sharded model" if shard is None else _place(*shard)
        if key not in parts:
            raise StateError(f"the saved state must hold part {key}, got parts {sorted(parts)}")
        return from_shard(parts[key], shard)
    if saved.get("shard") != shard:
        raise StateError(f"shard of the saved state must be {shard}, got {saved.get('shard')}")
    return {key: part for key, part in saved.items() if key != "shard"}


def take_apart(saved: dict[str, Any], sharding: Sharding) -> dict[str, Any]:
    """A rank's state dict as DCP is to save it."""
    ((replica, worker),) = saved["workers"].items()
    for name, part in owed_parts(saved, int(replica)):  # on other shards others will own the entries
        entries = worker["entries"][name]
        entries["owed"] = part.to(torch.promote_types(entries[owed_to(entries)].dtype, torch.float32))
    _by_parameter(worker, sharding)
    tree: dict[str, Any] = {}
    for slot in _slots(saved, replica, sharding):
        tensor, whole = slot.holder[slot.key], sharding.wholes[slot.parameter]
        if isinstance(tensor, Tensor) and tensor.shape == local(whole).shape:
            _put(tree, slot.path, like(tensor, whole, "cpu"))
            slot.holder[slot.key] = tensor.dtype
    _put(tree, ("replicas", replica, "rest", str(saved["shard"][0])), (saved,))
    return tree


def put_together(load: Load, sharding: Sharding, buckets: Buckets, shard: list[int]) -> dict[str, Any]:
    """A state dict that this rank can load, of all replicas that it needs, whatever mesh it was saved on.

    `load` reads the checkpoint, and is called equally often on every rank.
    """
    first = _rests(load, ["0"], 0)["0"]
    weights, num_parts = first["weights"], first["shard"][1]
    mine, is_same_cluster = buckets.rank.index, weights == buckets.rank.weights.tolist()
    replicas = [str(mine)] if is_same_cluster else [str(n) for n in range(len(weights))]
    part = shard[0] if num_parts == shard[1] else 0
    states = _rests(load, replicas, part)
    tree: Any = {}
    filled: list[_Slot] = []
    for replica, state in states.items():
        found = state["workers"][replica]["entries"]
        others = sorted(found.keys() ^ sharding.wholes.keys())
        if others:
            raise StateError(
                f"parameters of the saved state must be this model's, got a difference in {others}"
            )
        for slot in _slots(state, replica, sharding):
            dtype, whole = slot.holder[slot.key], sharding.wholes[slot.parameter]
            if isinstance(dtype, torch.dtype):
                _put(tree, slot.path, like(torch.zeros(local(whole).shape, dtype=dtype), whole, "cpu"))
                filled.append(slot)
            elif num_parts != shard[1] and isinstance(dtype, Tensor) and dtype.numel() > 1:
                raise StateError(
                    f"{slot.key} of parameter {slot.parameter!r} must have the parameter's shape, or be one "
                    f"number, to be loaded on another number of shards, got shape {tuple(dtype.shape)}"
                )
    load(tree)
    for slot in filled:
        slot.holder[slot.key] = local(reduce(getitem, slot.path, tree))
    for replica, state in states.items():
        worker = state["workers"][replica]
        is_other = _fit(state, worker, buckets, shard)
        _by_vector(worker, sharding, buckets)
        for fields in worker["entries"].values():
            owed = fields.pop("owed", 0)  # what this part owed as an owner, if it is still the same part
            if is_other and (field := owed_to(fields)) in fields:
                fields[field] = fields[field] + owed
    return merge_state_dicts(list(states.values()))


def _slots(saved: dict[str, Any], replica: str, sharding: Sharding) -> Iterator[_Slot]:
    """All places of a rank's state dict that may hold a part of a sharded tensor."""
    worker, own = saved["workers"][replica], ("replicas", replica)
    for name, fields in worker["entries"].items():
        for field in fields:
            yield _Slot(fields, field, (*own, "entries", name, field), name)
    if "updates" not in saved:
        return
    (mine,), updates = worker["updates"], saved["updates"]
    for name in mine["parameters"]:
        yield _Slot(mine["parameters"], name, (*own, "parameters", name), name)
    yield from _of_optimizer(mine["optimizer"], (*own, "optimizer"), sharding.inner)
    for name in updates["start"]:
        yield _Slot(updates["start"], name, ("start", name), name)
    yield from _of_optimizer(updates["outer_state"][0], ("outer",), sharding.outer)


def _of_optimizer(
    saved: dict[str, Any], path: tuple[str, ...], names: tuple[str | None, ...]
) -> Iterator[_Slot]:
    for index, state in saved.get("state", {}).items():
        name = names[index]
        if name is not None:
            yield from (_Slot(state, key, (*path, name, key), name) for key in state)


def _rests(load: Load, replicas: list[str], part: int) -> dict[str, dict[str, Any]]:
    """What some replicas have kept whole of a part, by replica."""
    tree: dict[str, Any] = {"replicas": {n: {"rest": {str(part): ()}} for n in replicas}}
    load(tree)
    return {n: tree["replicas"][n]["rest"][str(part)][0] for n in replicas}


def _fit(state: dict[str, Any], worker: dict[str, Any], buckets: Buckets, shard: list[int]) -> bool:
    """Whether a part of the model becomes another: what belonged to the old one as a whole starts anew."""
    parameters = [[name, list(shape)] for name, shape in buckets.parameters.shapes.items()]
    groups = [list(bucket.names) for bucket in buckets.all]
    if (state["shard"], state["parameters"], state["groups"]) == (shard, parameters, groups):
        return False
    state |= {"shard": shard, "parameters": parameters, "groups": groups}
    worker |= {"total": {}, "first_step": state["num_steps"], "padding": {}}
    fresh = [buckets.make(bucket.names).other_fields() for bucket in buckets.all]
    worker["groups"] = tuple({f: t for f, t in others.items() if f != "owed"} for others in fresh)
    return True


def _by_parameter(worker: dict[str, Any], sharding: Sharding) -> None:
    """Cut the vectors' entries by parameter; the padding is kept for a mesh of as many shards."""
    vectors = {name: {f: t.flatten() for f, t in of.items()} for name, of in worker["entries"].items()}
    padding = {name: {f: flat.clone() for f, flat in of.items()} for name, of in vectors.items()}
    entries: dict[str, Any] = {name: {} for name in sharding.wholes}
    for piece in sharding.pieces:
        part = local(sharding.wholes[piece.parameter])
        place = slice(piece.start, piece.start + part.numel())
        for field, flat in vectors.get(piece.vector, {}).items():
            entries[piece.parameter][field] = flat[place].view(part.shape)
            padding[piece.vector][field][place] = 0
    worker["entries"] = entries
    worker["padding"] = {
        name: {field: flat.to_sparse() for field, flat in of.items() if flat.any()}
        for name, of in padding.items()
    }


def _by_vector(worker: dict[str, Any], sharding: Sharding, buckets: Buckets) -> None:
    """The opposite of `_by_parameter`."""
    entries, padding, shapes = worker["entries"], worker.pop("padding"), buckets.parameters.shapes
    vectors: dict[str, Any] = {}
    for piece in sharding.pieces:
        shape = shapes[piece.vector]
        for field, part in entries[piece.parameter].items() if math.prod(shape) else ():
            fields = vectors.setdefault(piece.vector, {})
            if field not in fields:
                kept = padding.get(piece.vector, {}).get(field)
                flat = torch.zeros(shape, dtype=part.dtype) if kept is None else kept.to_dense()
                fields[field] = flat.view(shape)
            fields[field].view(-1)[piece.start : piece.start + part.numel()] = part.flatten()
    worker["entries"] = vectors


def _put(tree: dict[str, Any], path: tuple[str, ...], leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf
