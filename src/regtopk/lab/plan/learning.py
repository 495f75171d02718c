"""How many steps a method takes to a loss, as a multiple of dense's: what our own records say.

A faster step is not a better one. learned.json is made from recorded runs by benchmarks/steps_to_target.py.
"""

import json
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

from regtopk.core.codes import VALUE_BITS
from regtopk.lab.method import Method as Words
from regtopk.lab.plan.asked import make_algorithm
from regtopk.lab.plan.methods import DENSE, FP16, POWERSGD, Method
from regtopk.rounds import Rounds

LEARNED = Path(__file__).with_name("learned.json")
NEAR = 0.9  # with at least so many of its entries a method is taken to learn as a recorded one
Optimizer = Literal["sgd", "adamw"]


class Learned(NamedTuple):
    """A recorded method."""

    name: str  # with its options
    density: float
    value_code: str
    rounds: Rounds
    relative_steps: float  # over dense's; infinite if it never reached the loss


def about(optimizer: Optimizer) -> str:
    """What was trained, and to what."""
    return str(_read()[optimizer]["about"])


@lru_cache(maxsize=16384)
def relative_steps(method: Method, optimizer: Optimizer) -> float | None:
    """How many times dense's steps a method takes to the same loss; infinite if it never gets there.

    Where there is no record of the method itself, one that sends less stands in: fewer entries or fewer bits,
    more rarely or later. It cannot need fewer steps. None if there is none. No method is counted as faster
    than dense: where one is, as DGC with its momentum, the learning rates were not alike.
    """
    if method == DENSE:
        return 1.0
    found = [row for row in _rows(optimizer) if _is_same(row, method)]
    enough = [row.relative_steps for row in found if row.relative_steps < inf and _sends_no_more(row, method)]
    if enough:
        return max(1.0, min(enough))
    return inf if any(row.relative_steps == inf and _sends_no_more(method, row) for row in found) else None


def _is_same(row: Learned, method: Method) -> bool:
    """Whether they differ at most in how much they send, and when."""
    if row.rounds._replace(every=1, delay=0) != method.rounds._replace(every=1, delay=0):
        return False
    if {row.name, method.name} & {FP16.name, POWERSGD.name}:
        return row.name == method.name
    return make_algorithm(row.name, 0.5) == make_algorithm(method.name, 0.5)


def _sends_no_more(one: Learned | Method, other: Learned | Method) -> bool:
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
def _rows(optimizer: Optimizer) -> list[Learned]:
    rows = []
    for row in _read()[optimizer]["methods"]:
        words = Words.read(row["method"])
        options = [f"{key}={text}" for key, text in words.words if key in words.options]
        name = ":".join([words.algorithm, *options])
        steps = inf if row["relative_steps"] is None else row["relative_steps"]
        rows.append(Learned(name, row["density"], row["value_code"], words.rounds, steps))
    return rows
