"""State dicts of an exchange: by parameter name, for as many ranks as before or for others.

A state dict holds only dicts, lists, tuples, strings, numbers and CPU tensors::

    format, algorithm, num_steps
    options      of the algorithm, in words; those that load may have others, and say so
    weights      [w_0, ..., w_(N-1)]
    parameters   [[name, shape], ...]
    skip         [name, ...]                     which parameters were sent dense
    groups       [[name, ...], ...]              which parameters were exchanged together: the buckets
    workers      {"3": {entries, groups, total, first_step, report}}   one rank's, or all ranks' when gathered
        entries     {parameter: {field: tensor}}   per-entry state, in the parameter's shape
        groups      ({field: tensor}, ...)         the rest of each bucket's state; a tuple, since
                                                   torch.distributed.checkpoint keeps one whole
        total       {name: number}                 what was sent
        first_step  the step that `total` counts from (0 if missing)
        report      [loss, time_s], or [] if none is waiting for the next step
    updates      only of an `UpdateExchange`: see updates/saved.py
    shard        only of a sharded model: [which part of it, of how many]
    lost         only where ranks' states are gone for good: [rank, ...]; see `_resized`

Of a sharded model this is what each part has, under ``shards["1 of 2"]``.

The functions here change nothing: `loaded` checks a saved state as a whole and returns what to go on with.
"""

import ast
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, fields
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.options import check_number
from regtopk.core.owners import owed_by, owed_to
from regtopk.core.state import OnResize
from regtopk.core.worker import Report, check_weights
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.requests.record import Ledger, StepRecord
from regtopk.distributed.state.buckets import Bucket, Buckets, Entries
from regtopk.errors import StateError, log

FORMAT = 1
KEYS = frozenset({"format", "algorithm", "num_steps", "weights", "parameters", "skip", "groups", "workers"})
_SELECTION = ("indices", "own", "aggregate")  # where and what an algorithm sent last
MOST_STEPS = (1 << 31) - 1  # what the ranks can compare in a step


class Progress(NamedTuple):
    """What training has changed since the exchange was made."""

    buckets: list[Bucket]
    num_steps: int
    ledger: Ledger
    report: Report | None


def state_dict(buckets: Buckets, num_steps: int, ledger: Ledger, report: Report | None) -> dict[str, Any]:
    """One rank's state after the last finished step, tensors copied."""
    shapes, rank = buckets.parameters.shapes, buckets.rank
    worker = {
        "entries": {
            name: {field: part.to("cpu", copy=True) for field, part in parts.items()}
            for bucket in buckets.all
            for name, parts in bucket.entries().items()
        },
        "groups": tuple(
            {field: tensor.to("cpu", copy=True) for field, tensor in bucket.other_fields().items()}
            for bucket in buckets.all
        ),
        "total": ledger.total.as_dict(),
        "first_step": ledger.first_step,
        "report": [] if report is None else list(astuple(report)),
    }
    return {
        "format": FORMAT,
        "algorithm": buckets.algorithm.name,
        "options": repr(buckets.algorithm.options()),
        "num_steps": num_steps,
        "weights": rank.weights.tolist(),
        "parameters": [[name, list(shape)] for name, shape in shapes.items()],
        "skip": sorted(buckets.skipped),
        "groups": [list(bucket.names) for bucket in buckets.all],
        "workers": {str(rank.index): worker},
    }


def merge_state_dicts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One state dict from those of several ranks (the rank files of a run)."""
    if not parts:
        raise StateError("parts must hold at least one rank's state, got none")
    if all(isinstance(part, dict) and isinstance(part.get("shards"), dict) for part in parts):
        shards: dict[str, list[dict[str, Any]]] = {}
        for place, state in [item for part in parts for item in part["shards"].items()]:
            shards.setdefault(place, []).append(state)
        return {"shards": {place: merge_state_dicts(states) for place, states in shards.items()}}
    for part in parts:
        _check_keys(part, may_hold=frozenset({"updates", "shard", "lost"}))
        for key in sorted({*part, *parts[0]} - {"workers"}):
            if not _same(part.get(key), parts[0].get(key)):
                raise StateError(f"rank states must come from one moment of one run: {key} differs")
    workers = {rank: worker for part in parts for rank, worker in part["workers"].items()}
    return {**parts[0], "workers": workers}


def loaded(buckets: Buckets, saved: Any, *, keeps_buckets: bool) -> Progress:
    """What an exchange goes on with from a saved state: in the saved buckets, or the whole model as one."""
    if isinstance(saved, dict) and "updates" in saved:
        raise StateError(
            "the saved state must be of an exchange of gradients, got one of updates: load it into an "
            "UpdateExchange, which needs a process group"
        )
    _check_keys(saved, may_hold=frozenset({"lost"}))
    with malformed():
        _check_facts(buckets, saved)
        rank, weights = buckets.rank.index, buckets.rank.weights.tolist()
        saved_parts = [tuple(names) for names in saved["groups"]]
        parts = saved_parts if keeps_buckets else buckets.cut(tuple(buckets.parameters.named))
        new, is_same_cut = [buckets.make(part) for part in parts], parts == saved_parts
        is_same_cluster = saved["weights"] == weights and not saved.get("lost")
        needed = [rank] if is_same_cluster else kept_ranks(saved)
        refuse_missing(saved, needed, rank, len(weights))
        rules = {field: rule for bucket in new for field, rule in bucket.state.rules().items()}
        if not (is_same_cluster and is_same_cut and "owned" in rules.values()):
            saved = _with_nothing_owed(saved, needed)
        _check_workers(saved, needed, new, is_same_cut=is_same_cut)
        worker = saved["workers"][str(rank)] if is_same_cluster else _resized(saved, weights, rank, rules)
        for i, bucket in enumerate(new):
            bucket.load(worker["entries"], worker["groups"][i] if is_same_cut else {})
        report = Report(*map(float, worker["report"])) if worker["report"] else None
        return Progress(new, saved["num_steps"], _ledger(buckets.rank, saved), report)


@contextmanager
def malformed() -> Iterator[None]:
    """Turn whatever a damaged state leads to into one error: there is no end to the ways it can be wrong."""
    try:
        yield
    except StateError:
        raise
    except Exception as error:
        raise StateError(f"the saved state is malformed: {type(error).__name__}: {error}") from error


def refuse_missing(saved: dict[str, Any], needed: list[int], rank: int, num_workers: int) -> None:
    """Refuse a state that lacks the part of a rank which this one needs."""
    missing = [n for n in needed if str(n) not in saved["workers"]]
    if missing:
        raise StateError(
            f"the saved state of {len(saved['weights'])} ranks must hold rank(s) {missing} to be loaded on "
            f"rank {rank} of {num_workers} with these weights: gather it, or merge the rank files "
            "(regtopk.merge_state_dicts)"
        )


def kept_ranks(saved: dict[str, Any]) -> list[int]:
    """The ranks whose states are needed to go on with others: all but those that are lost."""
    ranks, lost = range(len(saved["weights"])), saved.get("lost", [])
    kept = [n for n in ranks if n not in lost]
    if not kept or not set(lost) <= set(ranks):
        raise StateError(f"lost of the saved state must be some of its {len(ranks)} ranks, got {lost}")
    return kept


def _ledger(rank: Rank, saved: dict[str, Any]) -> Ledger:
    """What was sent so far. What other ranks sent is not this rank's: on another number it counts anew."""
    num_steps: int = saved["num_steps"]
    if len(saved["weights"]) != rank.num_workers or str(rank.index) not in saved["workers"]:
        return Ledger(first_step=num_steps)
    worker = saved["workers"][str(rank.index)]
    total = {f.name: worker["total"][f.name] for f in fields(StepRecord) if f.name in worker["total"]}
    first_step = worker.get("first_step", 0)
    for name, number in total.items():
        check_number(name, number, "finite and >= 0", lambda x: 0 <= x < math.inf)
    check_number("first_step", first_step, f"in [0, {num_steps}]", lambda x: 0 <= x <= num_steps)
    record = StepRecord(**total)
    return Ledger(record, num_steps - first_step + record.num_skipped, first_step)


def _resized(
    saved: dict[str, Any], new_weights: list[float], rank: int, rules: dict[str, OnResize]
) -> dict[str, Any]:
    """What a rank starts from on other ranks or with other weights, so that sum_n w_n e_n stays what it was.

    weighted_sum   e'_m = sum of w_n e_n over the old ranks n given to m, over w'_m
    shared         copied
    reset, owned   left out, so it starts anew; what was owed is in the residuals (`_with_nothing_owed`)

    Old ranks are given, in order and evenly, to the new ranks that have weight. Of a lost rank nothing is
    left, and the sum is that of the others.
    """
    old_weights, kept = saved["weights"], kept_ranks(saved)
    old = {n: saved["workers"][str(n)] for n in kept}
    first = old[kept[0]]  # of what all ranks share
    active = [m for m, weight in enumerate(new_weights) if weight > 0]
    given = [n for i, n in enumerate(kept) if active[i * len(active) // len(kept)] == rank]
    entries: Entries = {name: dict(parts) for name, parts in first["entries"].items()}
    for name, parts in entries.items():
        for field in [field for field in parts if rules[field] != "shared"]:
            parts[field] = torch.zeros_like(parts[field], dtype=torch.float64)
            for n in given:
                parts[field] += old_weights[n] * old[n]["entries"][name][field].double() / new_weights[rank]
    shared = tuple(
        {field: tensor for field, tensor in others.items() if rules[field] == "shared"}
        for others in first["groups"]
    )
    return {"entries": entries, "groups": shared, "report": first["report"]}


def owed_parts(saved: dict[str, Any], rank: int) -> Iterator[tuple[str, Tensor]]:
    """What a rank owes as an owner, as parts of its residual, by parameter."""
    worker = saved["workers"][str(rank)]
    for names, others in zip(saved["groups"], worker["groups"], strict=True):
        if "owed" in others:
            entries = [worker["entries"][name] for name in names]
            residuals = [parts[owed_to(parts)] for parts in entries]
            numel = sum(residual.numel() for residual in residuals)
            owed = owed_by(rank, others["owed"], saved["weights"], numel)
            yield from zip(names, kernels.parts_of(owed, residuals), strict=True)


def _with_nothing_owed(saved: dict[str, Any], needed: list[int]) -> dict[str, Any]:
    """The same state, but what ranks owe as owners is in their residuals: others will own the entries."""
    workers = dict(saved["workers"])
    for n in needed:
        worker = workers[str(n)]
        if not any("owed" in others for others in worker["groups"]):
            continue
        entries: Entries = {name: dict(parts) for name, parts in worker["entries"].items()}
        for name, part in owed_parts(saved, n):
            field = owed_to(entries[name])
            entries[name][field] = entries[name][field].double() + part
        groups = tuple({f: t for f, t in others.items() if f != "owed"} for others in worker["groups"])
        workers[str(n)] = {**worker, "entries": entries, "groups": groups}
    return {**saved, "workers": workers}


def _same(left: Any, right: Any) -> bool:
    """Whether two parts of saved states are equal, tensors bit for bit."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right)


# What must be true before anything is used.


def _check_keys(saved: object, may_hold: frozenset[str] = frozenset()) -> None:
    if not isinstance(saved, dict) or set(saved) - may_hold - {"options"} != KEYS:
        found = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
        raise StateError(f"a saved exchange must hold {sorted(KEYS)}, got {found}")
    if saved["format"] != FORMAT:
        raise StateError(f"format of the saved state must be {FORMAT}, got {saved['format']!r}")


def _check_facts(buckets: Buckets, saved: dict[str, Any]) -> None:
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
    before = ast.literal_eval(saved.get("options", "{}"))  # of an older version, which may know fewer
    now = {name: given for name, given in buckets.algorithm.options().items() if name in before}
    if before != now and buckets.rank.index == 0:
        log.warning("goes on with other options: %s now, %s in the saved state", options, saved["options"])
    rule = f"an integer in 0..{MOST_STEPS}"
    check_number("num_steps", saved["num_steps"], rule, lambda n: type(n) is int and 0 <= n <= MOST_STEPS)
    check_weights(saved["weights"], len(saved["weights"]))
    names = sorted(name for part in saved["groups"] for name in part)
    is_whole = names == sorted(name for part in buckets.cut(tuple(shapes)) for name in part)
    if not is_whole or any(len(buckets.cut(tuple(part))) != 1 for part in saved["groups"]):
        told = f"{len(saved['groups'])} groups of {len(names)} names"
        raise StateError(f"groups of the saved state must hold all {len(shapes)} parameters once, got {told}")


def _check_workers(
    saved: dict[str, Any], needed: list[int], buckets: list[Bucket], *, is_same_cut: bool
) -> None:
    """The ranks this one needs are there, and hold what the buckets ask for."""
    for n in needed:
        worker = saved["workers"][str(n)]
        for i, bucket in enumerate(buckets):
            for name, like in bucket.entries().items():
                check_state(worker["entries"].get(name, {}), like, f"parameter {name!r} of rank {n}")
            if is_same_cut:
                _check_others(bucket, worker["groups"][i], f"bucket {i} of rank {n}")


def _check_others(bucket: Bucket, saved: dict[str, Tensor], where: str) -> None:
    """The fields that belong to a whole bucket."""
    fields = bucket.other_fields().items()
    expected = {field: tensor for field, tensor in fields if field in saved or field != "owed"}  # none: zero
    if check_state(saved, expected, where):
        indices, numel = saved["indices"], bucket.layout.numel
        is_inside = ((indices >= 0) & (indices < numel)).all()
        if indices.dim() != 1 or not bool(is_inside and (indices.diff() > 0).all()):
            rule = f"ascending, distinct and in 0..{numel - 1}"
            raise StateError(f"indices of {where} must be {rule}, got {indices.tolist()[:9]}")


def check_state(saved: dict[str, Tensor], like: dict[str, Tensor], where: str) -> bool:
    """The fields are those of another state, and finite; only the last selection may change in length.

    Returns:
        Whether there is a selection: its indices must be checked, too.
    """
    shapes = {field: tuple(tensor.shape) for field, tensor in like.items()}
    has_selection = all(field in like and field in saved for field in _SELECTION)
    if has_selection:
        shapes |= dict.fromkeys(_SELECTION, tuple(saved["indices"].shape))
    found = {field: tuple(tensor.shape) for field, tensor in saved.items()}
    if found != shapes:
        raise StateError(f"state of {where} must hold {shapes}, got {found}")
    for field, tensor in saved.items():
        dtype = like[field].dtype
        if (tensor.is_floating_point(), tensor.is_complex()) != (dtype.is_floating_point, dtype.is_complex):
            raise StateError(f"{field} of {where} must be of {dtype}, got {tensor.dtype}")
        if not bool(torch.isfinite(tensor.to(dtype)).all()):  # a float64 may be too large for its place
            raise StateError(f"{field} of {where} must be finite in {dtype}, got a NaN or inf")
    return has_selection
