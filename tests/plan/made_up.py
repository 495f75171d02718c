"""A made-up calibration: a machine with round numbers for every cost that can be measured."""

from pathlib import Path

from regtopk.plan.calibrate import measurable_lines
from regtopk.plan.costs import Calibration, Line

ROUND_NUMBERS: Line = {
    "calls": 1e-4,
    "messages": 1e-4,
    "bytes": 1e-10,
    "numel": 1e-9,
    "numel beyond": 1e-9,
    "entries": 1e-8,
}


def calibration(
    lines: dict[str, Line] | None = None, *, every: Line = ROUND_NUMBERS, device: str = "cpu"
) -> Calibration:
    """All costs alike, but for the given lines."""
    return Calibration({"device": device}, dict.fromkeys(measurable_lines(), every) | (lines or {}))


def write_calibration(path: Path, *, without: str | None = None) -> Path:
    """A file of it; an older one has not measured some line."""
    made = calibration()
    made.lines.pop(without or "", None)
    made.write(path)
    return path
