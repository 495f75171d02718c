"""Saving and loading an exchange: by parameter name, on as many ranks as before or on others.

A state dict holds only dicts, lists, strings, numbers and tensors::

    format, algorithm, num_workers, num_steps
    parameters   [[name, shape], ...]
    groups       [[name, ...], ...]              which parameters were exchanged together
    workers      {"3": {weight, entries, groups, total}}   one rank's, or all ranks' when gathered
        entries  {parameter: {field: tensor}}    per-entry state, in the parameter's shape
        groups   [{field: tensor}, ...]          the rest of each group's state
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from regtopk.distributed.groups import Entries, Group
from regtopk.distributed.record import StepRecord
from regtopk.errors import StateError

if TYPE_CHECKING:
    from regtopk.distributed.exchange import Exchange

FORMAT = 1


def state_dict(exchange: "Exchange") -> dict[str, Any]:
    """One rank's state, tensors copied."""
    groups = exchange.groups.groups
    entries: Entries = {}
    for group in groups:
        for name, parts in group.entries().items():
            shape = exchange.shapes[name]
            entries[name] = {field: part.reshape(shape).clone() for field, part in parts.items()}
    worker = {
        "weight": float(exchange.driver.weights[exchange.rank]),
        "entries": entries,
        "groups": [{f: t.clone() for f, t in group.other_fields().items()} for group in groups],
        "total": exchange.total.as_dict(),
    }
    return {
        "format": FORMAT,
        "algorithm": exchange.algorithm.name,
        "num_workers": exchange.num_workers,
        "num_steps": exchange.num_steps,
        "parameters": [[name, list(shape)] for name, shape in exchange.shapes.items()],
        "groups": [list(group.names) for group in groups],
        "workers": {str(exchange.rank): worker},
    }


def gather_state_dict(exchange: "Exchange", dst: int) -> dict[str, Any] | None:
    """All ranks' state in one dict, on rank `dst`."""
    is_dst = exchange.rank == dst
    parts: list[Any] | None = [None] * exchange.num_workers if is_dst else None
    dist.gather_object(state_dict(exchange), parts, group_dst=dst, group=exchange.driver.collectives.group)
    return None if parts is None else merge_state_dicts(parts)


def merge_state_dicts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One state dict from those of several ranks (the rank files of a run)."""
    for key in ("format", "algorithm", "num_workers", "num_steps", "parameters", "groups"):
        if any(part[key] != parts[0][key] for part in parts):
            raise StateError(f"rank states must come from one run: {key} differs between them")
    workers = {rank: worker for part in parts for rank, worker in part["workers"].items()}
    return {**parts[0], "workers": workers}


def load_state_dict(exchange: "Exchange", saved: dict[str, Any]) -> None:
    """Take over a saved state; everything is checked before anything changes."""
    _check(exchange, saved)
    is_same_size = saved["num_workers"] == exchange.num_workers
    workers = saved["workers"]
    if is_same_size:
        own = workers[str(exchange.rank)]
        entries, others = own["entries"], own["groups"]
    else:
        entries, others = _resized_entries(exchange, saved), None
    groups = exchange.groups.replace(tuple(names) for names in saved["groups"])
    for i, group in enumerate(groups):
        group.load(entries, _shared_only(group, workers["0"]["groups"][i]) if others is None else others[i])
    exchange.num_steps = saved["num_steps"]
    if is_same_size:
        exchange.set_total(StepRecord(**workers[str(exchange.rank)]["total"]))


def _check(exchange: "Exchange", saved: dict[str, Any]) -> None:
    if saved.get("format") != FORMAT:
        raise StateError(f"format of the saved state must be {FORMAT}, got {saved.get('format')!r}")
    if saved["algorithm"] != exchange.algorithm.name:
        raise StateError(
            f"algorithm of the saved state must be {exchange.algorithm.name!r}, got {saved['algorithm']!r}"
        )
    own = [[name, list(shape)] for name, shape in exchange.shapes.items()]
    for mine, theirs in zip(own, saved["parameters"], strict=False):
        if mine != theirs:
            raise StateError(
                f"parameters of the saved state must be this model's: expected {mine[0]!r} of shape "
                f"{tuple(mine[1])}, got {theirs[0]!r} of shape {tuple(theirs[1])}"
            )
    if len(own) != len(saved["parameters"]):
        longer = max(own, saved["parameters"], key=len)
        first = longer[min(len(own), len(saved["parameters"]))][0]
        raise StateError(
            f"parameters of the saved state must be this model's {len(own)}, got {len(saved['parameters'])}: "
            f"the first without a partner is {first!r}"
        )
    needed = range(saved["num_workers"])
    if saved["num_workers"] == exchange.num_workers:
        needed = range(exchange.rank, exchange.rank + 1)
    missing = [rank for rank in needed if str(rank) not in saved["workers"]]
    if missing:
        raise StateError(
            f"the saved state of {saved['num_workers']} ranks must hold rank(s) {missing} to be loaded on "
            f"rank {exchange.rank} of {exchange.num_workers}: gather it, or merge the rank files "
            "(regtopk.merge_state_dicts)"
        )


def _resized_entries(exchange: "Exchange", saved: dict[str, Any]) -> Entries:
    """Per-entry state for other ranks: e'_m = sum of w_n e_n over the old n given to m, over w'_m.

    Old ranks go, in order and evenly, to the new ranks that have weight.
    """
    weights = exchange.driver.weights.tolist()
    active = [rank for rank, weight in enumerate(weights) if weight > 0]
    num_old = saved["num_workers"]
    given = [n for n in range(num_old) if active[n * len(active) // num_old] == exchange.rank]
    old = [saved["workers"][str(n)] for n in range(num_old)]
    rules = {f: r for group in exchange.groups.groups for f, r in group.state.rules().items()}
    entries: Entries = {}
    for name, parts in old[0]["entries"].items():
        entries[name] = {}
        for field, first in parts.items():
            if rules.get(field) == "shared":
                entries[name][field] = first
                continue
            total = torch.zeros_like(first, dtype=torch.float64)
            for n in given:
                total += old[n]["weight"] * old[n]["entries"][name][field]
            own_weight = weights[exchange.rank]
            entries[name][field] = total / own_weight if own_weight > 0 else total
    return entries


def _shared_only(group: Group, saved: dict[str, Tensor]) -> dict[str, Tensor]:
    rules = group.state.rules()
    return {field: tensor for field, tensor in saved.items() if rules[field] == "shared"}
