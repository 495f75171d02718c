"""Print who follows dense, and how often it jumps, in records of fig2: python tools/jumps.py FOLDER..."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from regtopk.errors import RegtopkError
from regtopk.lab.runs import Run, read_run

METHODS = {"regtopk": "factor", "regtopk-cap": "cap"}
ITERATIONS = (2500, 4000, 10_000)


def as_markdown(folders: Sequence[Path]) -> str:
    """One row per run: its settings, then seeds within three times dense, and jumps, of both dampings."""
    names = [f"{name}: {what}" for name in METHODS.values() for what in (*map(str, ITERATIONS), "jumps")]
    head = ["N", "S", "loss, start", "dtype", "seeds", *names]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(_row(read_run(folder)))} |" for folder in folders]
    return "\n".join(lines) + "\n"


def _row(run: Run) -> list[str]:
    config = run.header["config"]
    (density,) = config["densities"]
    seeds = config["seeds"] or f"0-{config['num_seeds'] - 1}"
    whose = f"{config['loss']}, {config['start']}"
    row = [str(config["num_workers"]), str(density), whose, config["dtype"], seeds]
    for method in METHODS:
        following = {r["iteration"]: r["following"] for r in run.records if r["method"] == method}
        jumps = run.summary["num_jumps"][method][str(density)]
        row += [str(following[iteration]) for iteration in ITERATIONS]
        row += [f"{sum(jumps):,} on {sum(count > 0 for count in jumps)}" if any(jumps) else "0"]
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="+", help="a recorded run of fig2, to iteration 10,000")
    try:
        sys.stdout.write(as_markdown(parser.parse_args().folder))
    except RegtopkError as error:
        parser.error(str(error))
