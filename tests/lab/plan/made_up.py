"""A made-up calibration: a machine with round numbers for every cost that any method has."""

from pathlib import Path

from regtopk.lab.plan.costs import Calibration, Line
from regtopk.lab.plan.methods import DILOCO, exchange_of, planned_methods, update_labels
from regtopk.lab.plan.workload import Workload

ROUND_NUMBERS: Line = {
    "calls": 1e-4,
    "messages": 1e-4,
    "bytes": 1e-10,
    "numel": 1e-9,
    "numel beyond": 1e-9,
    "entries": 1e-8,
}


def all_lines() -> set[str]:
    """The names of all costs."""
    labels = [DILOCO.format(16), *update_labels(["topk", "topk:impute=0.35", "topk:impute=learned"], 2)]
    methods = planned_methods((0.01,), every=True) + planned_methods((0.01,), labels=labels)
    return set[str]().union(*(exchange_of(m, Workload.of_size(10**6), 4).lines for m in methods))


def calibration(
    lines: dict[str, Line] | None = None, *, every: Line = ROUND_NUMBERS, device: str = "cpu"
) -> Calibration:
    """All costs alike, but for the given lines."""
    return Calibration({"device": device}, dict.fromkeys(all_lines(), every) | (lines or {}))


def write_calibration(path: Path, *without: str) -> Path:
    """A file of it; an older one has not measured some lines."""
    made = calibration()
    for line in without:
        del made.lines[line]
    made.write(path)
    return path
