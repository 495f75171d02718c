"""What must be true of a saved state before anything of it is used: see saved.py."""

import logging
from typing import Any

import torch
from torch import Tensor

from regtopk.core.worker import check_weights
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.state.buckets import Bucket, Buckets, Entries
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
    _check_parameters([[name, list(shape)] for name, shape in shapes.items()], saved["parameters"])
    for key, expected in (("algorithm", buckets.algorithm.name), ("skip", sorted(buckets.skipped))):
        if saved[key] != expected:
            raise StateError(f"{key} must be that of the saved state, {saved[key]!r}, got {expected!r}")
    options = repr(buckets.algorithm.options())
    if saved.get("options", options) != options and buckets.rank.index == 0:
        _log.warning("goes on with other options: %s now, %s in the saved state", options, saved["options"])
    num_steps = saved["num_steps"]
    if type(num_steps) is not int or not 0 <= num_steps < _MOST_STEPS:
        raise StateError(
            f"num_steps of the saved state must be an integer of at least 0 and below {_MOST_STEPS}, got "
            f"{num_steps!r}"
        )
    check_weights(saved["weights"], len(saved["weights"]))
    names = sorted(name for part in saved["groups"] for name in part)
    is_whole = names == sorted(name for part in buckets.cut(tuple(shapes)) for name in part)
    if not is_whole or any(len(buckets.cut(tuple(part))) != 1 for part in saved["groups"]):
        raise StateError(
            f"groups of the saved state must hold each of the {len(shapes)} parameters once, got "
            f"{len(saved['groups'])} groups of {len(names)} names, {len(set(names))} of them different"
        )


def _check_parameters(expected: list[Any], saved: list[Any]) -> None:
    for mine, theirs in zip(expected, saved, strict=False):
        if mine != theirs:
            raise StateError(
                f"parameters of the saved state must be this model's: expected {mine[0]!r} of shape "
                f"{tuple(mine[1])}, got {theirs[0]!r} of shape {tuple(theirs[1])}"
            )
    if len(expected) != len(saved):
        first = max(expected, saved, key=len)[min(len(expected), len(saved))][0]
        raise StateError(
            f"parameters of the saved state must be this model's {len(expected)}, got {len(saved)}: "
            f"the first without a partner is {first!r}"
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
            _check_entries(bucket, worker["entries"], n)
            if is_same_cut:
                _check_others(bucket, worker["groups"][i], f"bucket {i} of rank {n}")


def _check_entries(bucket: Bucket, entries: Entries, rank: int) -> None:
    for layer in bucket.layout.layers:
        where = f"parameter {layer.name!r} of rank {rank}"
        saved = entries.get(layer.name, {})
        found = {field: tuple(part.shape) for field, part in saved.items()}
        expected = {field: layer.shape for field in bucket.entry_fields()}
        if found != expected:
            raise StateError(f"state of {where} must hold {expected}, got {found}")
        for field, part in saved.items():
            _check_numbers(part, getattr(bucket.state, field), f"{field} of {where}")


def _check_others(bucket: Bucket, saved: dict[str, Tensor], where: str) -> None:
    """The fields that belong to a whole bucket; only those of the last selection may change in length."""
    expected = bucket.other_fields()
    if sorted(saved) != sorted(expected):
        raise StateError(f"state of {where} must hold {sorted(expected)}, got {sorted(saved)}")
    selection = _SELECTION if all(field in expected for field in _SELECTION) else ()
    for field, tensor in saved.items():
        shape = saved["indices"].shape if field in selection else expected[field].shape
        if tensor.shape != shape:
            raise StateError(f"{field} of {where} must be of shape {tuple(shape)}, got {tuple(tensor.shape)}")
        _check_numbers(tensor, expected[field], f"{field} of {where}")
    if selection:
        _check_indices(saved["indices"], bucket.layout.numel, f"indices of {where}")


def _check_numbers(saved: Tensor, like: Tensor, where: str) -> None:
    """They are of the kind that is expected, and finite in the dtype they are loaded into."""
    kinds = [(t.is_floating_point(), t.is_complex()) for t in (saved, like)]
    if kinds[0] != kinds[1]:
        raise StateError(f"{where} must be of {like.dtype}, got {saved.dtype}")
    if not bool(torch.isfinite(saved.to(like.dtype)).all()):  # a float64 may be too large for its place
        raise StateError(f"{where} must be finite in {like.dtype}, got a NaN or inf")


def _check_indices(indices: Tensor, numel: int, where: str) -> None:
    is_ascending = indices.dim() == 1 and bool((indices.diff() > 0).all())
    if not is_ascending or (indices.numel() and not 0 <= int(indices[0]) <= int(indices[-1]) < numel):
        raise StateError(
            f"{where} must be ascending, distinct and in 0..{numel - 1}, got {indices.tolist()[:9]}"
        )
