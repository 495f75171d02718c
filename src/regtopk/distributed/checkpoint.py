"""Saving and loading an exchange: by parameter name, on as many ranks as before or on others.

A state dict holds only dicts, lists, tuples, strings, numbers and CPU tensors::

    format, algorithm, num_steps
    weights      [w_0, ..., w_(N-1)]
    parameters   [[name, shape], ...]
    skip         [name, ...]                     which parameters were sent dense
    groups       [[name, ...], ...]              which parameters were exchanged together
    workers      {"3": {entries, groups, total, report}}   one rank's, or all ranks' when gathered
        entries  {parameter: {field: tensor}}    per-entry state, in the parameter's shape
        groups   ({field: tensor}, ...)          the rest of each group's state; a tuple, which
                                                 torch.distributed.checkpoint keeps whole, whatever its shapes
        total    {name: number}                  what was sent
        report   [loss, time_s], or [] if none is waiting for the next step
"""

from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from regtopk.core.worker import Report
from regtopk.distributed.groups import Entries, Group
from regtopk.distributed.record import Ledger, StepRecord
from regtopk.distributed.resize import resized_worker
from regtopk.errors import StateError

if TYPE_CHECKING:
    from regtopk.distributed.exchange import Exchange

FORMAT = 1
_KEYS = {"format", "algorithm", "num_steps", "weights", "parameters", "skip", "groups", "workers"}


def state_dict(exchange: "Exchange") -> dict[str, Any]:
    """One rank's state, tensors copied."""
    exchange.check_usable()
    groups = exchange.groups.groups
    entries: Entries = {}
    for group in groups:
        for name, parts in group.entries().items():
            shape = exchange.parameters.shapes[name]
            entries[name] = {f: part.to("cpu", copy=True).view(shape) for f, part in parts.items()}
    worker = {
        "entries": entries,
        "groups": tuple({f: t.to("cpu", copy=True) for f, t in g.other_fields().items()} for g in groups),
        "total": exchange.total.as_dict(),
        "report": list(astuple(report)) if (report := exchange.pending_report) else [],
    }
    return {
        "format": FORMAT,
        **_facts(exchange),
        "num_steps": exchange.num_steps,
        "weights": exchange.driver.weights.tolist(),
        "groups": [list(group.names) for group in groups],
        "workers": {str(exchange.rank): worker},
    }


def _facts(exchange: "Exchange") -> dict[str, Any]:
    """What a saved state must have in common with the exchange that loads it."""
    return {
        "algorithm": exchange.algorithm.name,
        "parameters": [[name, list(shape)] for name, shape in exchange.parameters.shapes.items()],
        "skip": sorted(exchange.skipped),
    }


def gather_state_dict(exchange: "Exchange", dst: int) -> dict[str, Any] | None:
    """All ranks' state in one dict, on rank `dst`."""
    parts = exchange.driver.collectives.gather_objects(state_dict(exchange), dst)
    return None if parts is None else merge_state_dicts(parts)


def merge_state_dicts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One state dict from those of several ranks (the rank files of a run)."""
    if not parts:
        raise StateError("parts must hold at least one rank's state, got none")
    for part in parts:
        _check_keys(part)
        for key in sorted(_KEYS - {"workers"}):
            if part[key] != parts[0][key]:
                raise StateError(
                    f"rank states must come from one moment of one run: {key} differs between them"
                )
    workers = {rank: worker for part in parts for rank, worker in part["workers"].items()}
    return {**parts[0], "workers": workers}


def load_state_dict(exchange: "Exchange", saved: dict[str, Any]) -> None:
    """Take over a saved state; everything is checked before anything changes."""
    _check_keys(saved)
    _check_facts(exchange, saved)
    saved_parts = [tuple(names) for names in saved["groups"]]
    parts = exchange.groups_to_resume(saved_parts)
    new = [exchange.groups.make(part) for part in parts]
    weights = exchange.driver.weights.tolist()
    is_same = saved["weights"] == weights
    needed = [exchange.rank] if is_same else list(range(len(saved["weights"])))
    _check_workers(exchange, saved, needed, new, keeps_groups=parts == saved_parts)
    if is_same:
        worker = saved["workers"][str(exchange.rank)]
    else:
        rules = {field: rule for group in new for field, rule in group.state.rules().items()}
        worker = resized_worker(saved, weights, exchange.rank, rules)
    for i, group in enumerate(new):
        group.load(worker["entries"], worker["groups"][i] if parts == saved_parts else None)
    exchange.groups.groups = new
    exchange.num_steps = saved["num_steps"]
    exchange.pending_report = Report(*worker["report"]) if worker["report"] else None
    is_same_size = len(saved["weights"]) == exchange.num_workers
    exchange.ledger = _ledger(saved, exchange.rank) if is_same_size else Ledger()


def _ledger(saved: dict[str, Any], rank: int) -> Ledger:
    total = StepRecord(**saved["workers"][str(rank)]["total"])
    return Ledger(total, saved["num_steps"] + total.num_skipped)


def _check_keys(saved: object) -> None:
    if not isinstance(saved, dict) or set(saved) != _KEYS:
        found = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
        raise StateError(f"a saved exchange must hold {sorted(_KEYS)}, got {found}")
    if saved["format"] != FORMAT:
        raise StateError(f"format of the saved state must be {FORMAT}, got {saved['format']!r}")


def _check_facts(exchange: "Exchange", saved: dict[str, Any]) -> None:
    facts = _facts(exchange)
    _check_parameters(facts["parameters"], saved["parameters"])
    for key in ("algorithm", "skip"):
        if saved[key] != facts[key]:
            raise StateError(f"{key} of the saved state must be {facts[key]!r}, got {saved[key]!r}")
    names = sorted(name for group in saved["groups"] for name in group)
    shapes = exchange.parameters.shapes
    if names != sorted(name for part in exchange.cut(tuple(shapes)) for name in part):
        raise StateError("groups of the saved state must hold every parameter once, got others")


def _check_parameters(own: list[Any], saved: list[Any]) -> None:
    for mine, theirs in zip(own, saved, strict=False):
        if mine != theirs:
            raise StateError(
                f"parameters of the saved state must be this model's: expected {mine[0]!r} of shape "
                f"{tuple(mine[1])}, got {theirs[0]!r} of shape {tuple(theirs[1])}"
            )
    if len(own) != len(saved):
        first = max(own, saved, key=len)[min(len(own), len(saved))][0]
        raise StateError(
            f"parameters of the saved state must be this model's {len(own)}, got {len(saved)}: "
            f"the first without a partner is {first!r}"
        )


def _check_workers(
    exchange: "Exchange", saved: dict[str, Any], needed: list[int], groups: list[Group], *, keeps_groups: bool
) -> None:
    """The ranks this one needs are there, and hold what the groups ask for."""
    missing = [rank for rank in needed if str(rank) not in saved["workers"]]
    if missing:
        raise StateError(
            f"the saved state of {len(saved['weights'])} ranks must hold rank(s) {missing} to be loaded on "
            f"rank {exchange.rank} of {exchange.num_workers} with these weights: gather it, or merge the "
            "rank files (regtopk.merge_state_dicts)"
        )
    for rank in needed:
        worker = saved["workers"][str(rank)]
        for i, group in enumerate(groups):
            _check_entries(group, worker["entries"], rank)
            found = sorted(worker["groups"][i]) if keeps_groups else []
            if keeps_groups and found != sorted(group.other_fields()):
                raise StateError(
                    f"state of group {i} of rank {rank} must hold {sorted(group.other_fields())}, got {found}"
                )


def _check_entries(group: Group, entries: Entries, rank: int) -> None:
    for layer in group.layout.layers:
        found = {field: tuple(part.shape) for field, part in entries.get(layer.name, {}).items()}
        expected = {field: layer.shape for field in group.entry_fields()}
        if found != expected:
            raise StateError(
                f"state of parameter {layer.name!r} of rank {rank} must hold {expected}, got {found}"
            )
