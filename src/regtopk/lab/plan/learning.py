"""How many steps a method takes to a loss, as a multiple of dense's: what our own records say.

A faster step is not a better one. learned.json is made from recorded runs by benchmarks/steps_to_target.py.
"""

import json
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, Literal

from regtopk.core.codes import VALUE_BITS
from regtopk.lab.method import Method
from regtopk.lab.plan.methods import DENSE, TORCH, PlannedMethod

LEARNED = Path(__file__).with_name("learned.json")
NEAR = 0.9  # with at least so many of its entries a method is taken to learn as a recorded one
Optimizer = Literal["sgd", "adamw"]
Row = tuple[PlannedMethod, float]  # a recorded method, and its steps over dense's; infinite: never there


def about(optimizer: Optimizer) -> str:
    """What was trained, and to what."""
    return str(_read()[optimizer]["about"])


@lru_cache(maxsize=16384)
def relative_steps(method: PlannedMethod, optimizer: Optimizer) -> float | None:
    """How many times dense's steps a method takes to the same loss; infinite if it never gets there.

    Where there is no record of the method itself, one that sends less stands in: fewer entries or fewer bits,
    more rarely or later. It cannot need fewer steps. None if there is none. No method is counted as faster
    than dense: where one is, as DGC with its momentum, the learning rates were not alike.
    """
    if method == DENSE:
        return 1.0
    found = [(row, steps) for row, steps in _rows(optimizer) if _is_same(row, method)]
    enough = [steps for row, steps in found if steps < inf and _sends_no_more(row, method)]
    if enough:
        return max(1.0, min(enough))
    return inf if any(steps == inf and _sends_no_more(method, row) for row, steps in found) else None


def _is_same(row: PlannedMethod, method: PlannedMethod) -> bool:
    """Whether they differ at most in how much they send, and when."""
    without_times = (each.rounds._replace(every=1, delay=0) for each in (row, method))
    if row.algorithm != method.algorithm or len(set(without_times)) > 1:
        return False
    if method in TORCH:
        return True
    one, other = (Method.parse(each.name).build(density=0.5, value_code=None) for each in (row, method))
    return one == other


def _sends_no_more(one: PlannedMethod, other: PlannedMethod) -> bool:
    """Whether one sends at most as many entries and bits as the other, at most as often and as soon."""
    return (
        NEAR * one.density <= other.density
        and VALUE_BITS[one.value_code] <= VALUE_BITS[other.value_code]
        and one.rounds.every >= other.rounds.every
        and one.rounds.delay >= other.rounds.delay
    )


@lru_cache(maxsize=1)
def _read() -> dict[str, Any]:
    return dict(json.loads(LEARNED.read_text(encoding="utf-8")))


@lru_cache(maxsize=2)
def _rows(optimizer: Optimizer) -> list[Row]:
    rows = []
    for row in _read()[optimizer]["methods"]:
        words = Method.read(row["method"])
        options = [f"{key}={text}" for key, text in words.words if key in words.options]
        name = ":".join([words.algorithm, *options])
        method = PlannedMethod(name, row["density"], row["value_code"], words.rounds)
        rows.append((method, inf if row["relative_steps"] is None else row["relative_steps"]))
    return rows
