"""Which learning rate serves each method best, and what is the accuracy that all must reach?

Every method gets the same learning rates. They are tried on the unshaped link, where a run takes less time
and the models are the same: what is sent does not depend on how fast it travels.
"""

import statistics
from typing import Any

from benchmarks.slow_network.methods import Method

Row = dict[str, Any]
BELOW_DENSE = 1.0  # points of accuracy
NUM_LAST = 3  # evaluations that make an accuracy: a single one jumps by a point or two


def reached_accuracy(curve: list[list[float]]) -> float:
    """The mean of the last evaluations; nothing is reached before there are that many."""
    if len(curve) < NUM_LAST:
        return 0.0
    return statistics.mean(accuracy for _, accuracy in curve[-NUM_LAST:])


def target_of(dense_rows: list[Row]) -> float:
    """One point below dense's final accuracy, with the learning rate that makes that highest."""
    return max(reached_accuracy(row["curve"]) for row in dense_rows) - BELOW_DENSE


def steps_to(row: Row, target: float) -> int | None:
    """Steps of a run until it reached the target; None if it did not."""
    every: int = row["steps"] // len(row["curve"])
    for count in range(1, len(row["curve"]) + 1):
        if reached_accuracy(row["curve"][:count]) >= target:
            return every * count
    return None


def best_lr(rows: list[Row], target: float) -> float | None:
    """The learning rate of the run that reached the target in the fewest steps; None if none did."""
    steps = {row["lr"]: steps_to(row, target) for row in rows}
    found = {lr: count for lr, count in steps.items() if count is not None}
    return min(found, key=found.__getitem__) if found else None


def rows_of(method: Method, rows: list[Row], **settings: Any) -> list[Row]:
    """The runs of a method, with the settings given."""
    wanted = {
        "method": method.name,
        "density": method.density,
        "value_code": method.value_code,
        "collective": method.collective,
        **settings,
    }
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]
