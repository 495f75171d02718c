"""A made-up calibration: a machine with round numbers for every cost that any method has."""

from regtopk.lab.plan.costs import Calibration, Line

ROUND_NUMBERS: Line = {"calls": 1e-4, "messages": 1e-4, "bytes": 1e-10, "entries": 1e-8}
ROUND_NUMBERS |= {"numel": 1e-9, "numel beyond": 1e-9}
CODED = [f"{code}{senders}" for code in ("float32", "4bit") for senders in ("", " senders")]
LINES = {
    *("step", "pass", "ddp", "fp16", "powersgd", "sparse none", "dense float32", "dense 4bit"),
    *(f"move {kind}" for kind in ("all_reduce", "all_reduce half", "all_to_all", "all_gather")),
    *(f"{work} {code}" for work in ("select", "sparse") for code in CODED),
}


def calibration(
    lines: dict[str, Line] | None = None, *, every: Line = ROUND_NUMBERS, device: str = "cpu"
) -> Calibration:
    """All costs alike, but for the given lines."""
    return Calibration({"device": device}, dict.fromkeys(LINES, every) | (lines or {}))
