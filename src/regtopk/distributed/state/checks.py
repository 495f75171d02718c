"""What must be true of a saved state before anything of it is used: see saved.py."""

import logging
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from regtopk.core.options import check_number
from regtopk.core.worker import check_weights
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.state.buckets import Bucket, Buckets
from regtopk.errors import StateError

FORMAT = 1
KEYS = frozenset({"format", "algorithm", "num_steps", "weights", "parameters", "skip", "groups", "workers"})
_SELECTION = ("indices", "own", "aggregate")  # where and what an algorithm sent last
_MOST_STEPS = 1 << 31  # what the ranks can compare in a step
_log = logging.getLogger("regtopk")


def check_keys(saved: object, may_hold: frozenset[str] = frozenset()) -> None:
    """It holds what a state dict holds, in the format that is read here."""
    if not isinstance(saved, dict) or set(saved) - may_hold - {"options"} != KEYS:
        found = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
        raise StateError(f"a saved exchange must hold {sorted(KEYS)}, got {found}")
    if saved["format"] != FORMAT:
        raise StateError(f"format of the saved state must be {FORMAT}, got {saved['format']!r}")


def check_facts(buckets: Buckets, saved: dict[str, Any]) -> None:
    """It is of this model and this algorithm, and its numbers can be."""
    shapes = buckets.parameters.shapes
    found = [(name, tuple(shape)) for name, shape in saved["parameters"]]
    for mine, theirs in zip_longest(shapes.items(), found):
        if mine != theirs:
            raise StateError(f"parameters of the saved state must be this model's: {mine}, got {theirs}")
    for key, expected in (("algorithm", buckets.algorithm.name), ("skip", sorted(buckets.skipped))):
        if saved[key] != expected:
            raise StateError(f"{key} must be that of the saved state, {saved[key]!r}, got {expected!r}")
    options = repr(buckets.algorithm.options())
    if saved.get("options", options) != options and buckets.rank.index == 0:
        _log.warning("goes on with other options: %s now, %s in the saved state", options, saved["options"])
    rule = f"an integer in 0..{_MOST_STEPS - 1}"
    check_number("num_steps", saved["num_steps"], rule, lambda n: type(n) is int and 0 <= n < _MOST_STEPS)
    check_weights(saved["weights"], len(saved["weights"]))
    names = sorted(name for part in saved["groups"] for name in part)
    is_whole = names == sorted(name for part in buckets.cut(tuple(shapes)) for name in part)
    if not is_whole or any(len(buckets.cut(tuple(part))) != 1 for part in saved["groups"]):
        raise StateError(
            f"groups of the saved state must hold each of the {len(shapes)} parameters once, got "
            f"{len(saved['groups'])} groups of {len(names)} names"
        )


def check_workers(
    rank: Rank, saved: dict[str, Any], needed: list[int], buckets: list[Bucket], *, is_same_cut: bool
) -> None:
    """The ranks this one needs are there, and hold what the buckets ask for."""
    missing = [n for n in needed if str(n) not in saved["workers"]]
    if missing:
        raise StateError(
            f"the saved state of {len(saved['weights'])} ranks must hold rank(s) {missing} to be loaded on "
            f"rank {rank.index} of {rank.num_workers} with these weights: gather it, or merge the rank "
            "files (regtopk.merge_state_dicts)"
        )
    for n in needed:
        worker = saved["workers"][str(n)]
        for i, bucket in enumerate(buckets):
            of_vector = {field: getattr(bucket.state, field) for field in bucket.entry_fields()}
            for layer in bucket.layout.layers:
                shapes = dict.fromkeys(of_vector, layer.shape)
                where = f"parameter {layer.name!r} of rank {n}"
                _check_fields(worker["entries"].get(layer.name, {}), of_vector, shapes, where)
            if is_same_cut:
                _check_others(bucket, worker["groups"][i], f"bucket {i} of rank {n}")


def _check_others(bucket: Bucket, saved: dict[str, Tensor], where: str) -> None:
    """The fields that belong to a whole bucket; only those of the last selection may change in length."""
    expected = bucket.other_fields()
    shapes = {field: tuple(tensor.shape) for field, tensor in expected.items()}
    has_selection = all(field in expected and field in saved for field in _SELECTION)
    if has_selection:
        shapes |= dict.fromkeys(_SELECTION, tuple(saved["indices"].shape))
    _check_fields(saved, expected, shapes, where)
    if has_selection:
        indices, numel = saved["indices"], bucket.layout.numel
        is_inside = indices.dim() == 1 and bool(((indices >= 0) & (indices < numel)).all())
        if not is_inside or not bool((indices.diff() > 0).all()):
            rule = f"ascending, distinct and in 0..{numel - 1}"
            raise StateError(f"indices of {where} must be {rule}, got {indices.tolist()[:9]}")


def _check_fields(
    saved: dict[str, Tensor], like: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], where: str
) -> None:
    """They are there, of these shapes and kinds, and finite in the dtype they are loaded into."""
    found = {field: tuple(tensor.shape) for field, tensor in saved.items()}
    if found != shapes:
        raise StateError(f"state of {where} must hold {shapes}, got {found}")
    for field, tensor in saved.items():
        dtype = like[field].dtype
        if (tensor.is_floating_point(), tensor.is_complex()) != (dtype.is_floating_point, dtype.is_complex):
            raise StateError(f"{field} of {where} must be of {dtype}, got {tensor.dtype}")
        if not bool(torch.isfinite(tensor.to(dtype)).all()):  # a float64 may be too large for its place
            raise StateError(f"{field} of {where} must be finite in {dtype}, got a NaN or inf")
