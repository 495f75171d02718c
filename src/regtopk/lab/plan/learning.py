"""How many steps a method takes to a loss, as a multiple of dense's: what our own records say.

A faster step is not a better one. learned.json is made from recorded runs by benchmarks/steps_to_target.py.
"""

import json
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

from regtopk.core.codes import VALUE_BITS
from regtopk.lab.method import Method
from regtopk.lab.plan.methods import DENSE, TORCH, PlannedMethod

LEARNED = Path(__file__).with_name("learned.json")
NEAR = 0.9  # with at least so many of its entries a method is taken to learn as a recorded one
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}  # as people write them


def about(optimizer: str) -> str:
    """What was trained, and to what."""
    return str(_read(optimizer)["about"])


@lru_cache(maxsize=16384)
def relative_steps(method: PlannedMethod, optimizer: str, num_workers: int = 8) -> float | None:
    """How many times dense's steps a method takes to the same loss; infinite if it never gets there.

    Without a record of the method itself, one that sends less stands in (docs/planning.md). None if there is
    none. Of records with different numbers of workers, that of the next larger counts, or the largest.
    Nothing counts as faster than dense: where DGC with its momentum is, learning rates were not alike.
    """
    if method == DENSE:
        return 1.0
    enough: dict[int, float] = {}  # by the number of workers
    has_failed = False
    for row in _read(optimizer)["methods"]:
        words, steps = Method.read(row["method"]), row["relative_steps"]
        recorded = PlannedMethod.of(words, row["density"], row["value_code"])
        if not _is_same(recorded, method):
            continue
        if steps is not None and _sends_no_more(recorded, method):
            enough[row["workers"]] = min(steps, enough.get(row["workers"], inf))
        has_failed |= steps is None and _sends_no_more(method, recorded)
    if enough:
        return max(1.0, enough[min((n for n in enough if n >= num_workers), default=max(enough))])
    return inf if has_failed else None


def _is_same(one: PlannedMethod, other: PlannedMethod) -> bool:
    """Whether they differ at most in how much they send, and when."""
    rounds, other_rounds = (method.rounds._replace(every=1, delay=0) for method in (one, other))
    is_same = one.algorithm == other.algorithm and rounds == other_rounds
    if not is_same or other in TORCH:
        return is_same
    built = [Method.parse(each.name).build(density=0.5, value_code=None) for each in (one, other)]
    return built[0] == built[1]


def _sends_no_more(one: PlannedMethod, other: PlannedMethod) -> bool:
    """Whether one sends at most as many entries and bits as the other, at most as often and as soon."""
    return (
        NEAR * one.density <= other.density
        and VALUE_BITS[one.value_code] <= VALUE_BITS[other.value_code]
        and one.rounds.every >= other.rounds.every
        and one.rounds.delay >= other.rounds.delay
    )


@lru_cache(maxsize=3)
def _read(optimizer: str) -> dict[str, Any]:
    return dict(json.loads(LEARNED.read_text(encoding="utf-8"))[optimizer])
