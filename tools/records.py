"""The rows of recorded runs, as the tools of pages and figures read them."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from regtopk.lab.method import Method
from regtopk.lab.plan.exchange import Workload, exchange_of
from regtopk.lab.plan.methods import PlannedMethod
from regtopk.lab.runs.reading import read_header, read_records

ROOT = Path(__file__).parents[1]
GATHERED = ("topk", "dgc", "sparseloco", "demo")  # a rank receives the messages of all others
Row = dict[str, Any]


@cache
def rows_of(run: str) -> dict[str, Row]:
    """The rows of a record by their words: of a folder in docs/results, or a file in benchmarks/results."""
    folder = ROOT / "docs" / "results" / run
    if folder.exists():
        return rows_in(folder)
    file = ROOT / "benchmarks" / "results" / f"{run}.json"
    return dict(map(_measured, json.loads(file.read_text("utf-8"))["results"]))


def _measured(row: Row) -> tuple[str, Row]:
    """The words of a measurement, and its number: of ddp_step.py a time, of slow_rank.py steps per second."""
    if "late" in row:
        words, number = f"{row['late']}, every={row['every']}", row["steps_per_s"]
    else:
        words, number = row["variant"], row["step_s_over_no_hook"]
    return words.replace(", ", ":").replace(" ", "-"), {"mean": number}


def rows_in(folder: Path) -> dict[str, Row]:
    """The results of a folder, each with the number of workers and what a search of learning rates found."""
    results = json.loads((folder / "summary.json").read_text("utf-8"))["results"]
    num_workers = read_header(folder)["config"].get("num_workers")
    tuning = _searched(folder) | {record["method"]: record.get("tuning") for record in read_records(folder)}
    searched = [{"method": method} for method in tuning]  # perhaps not run yet
    return {
        row["method"]: row | {"num_workers": num_workers, "tuning": tuning.get(row["method"])}
        for row in [*searched, *results]
    }


def _searched(folder: Path) -> dict[str, dict[str, float]]:
    """What searches that are under way have found by learning rate, by the words of methods."""
    path = folder / "search.json"
    found: dict[str, dict[str, float]] = {}
    for key, run in json.loads(path.read_text("utf-8")).items() if path.exists() else ():
        method, settings, *_ = json.loads(key)
        found.setdefault(method, {})[f"{settings['lr']:g}"] = run["final"]
    return found


def row_of(run: str, words: str) -> Row:
    """The row that has these words; of several, the one with the fewest others."""
    asked, rows = {*words.split(":")}, rows_of(run)
    labels = sorted((label for label in rows if asked <= {*label.split(":")}), key=_num_words)
    if [*map(_num_words, labels)].count(_num_words(labels[0]) if labels else 0) != 1:
        raise ValueError(f"{run} must have one row of {words}, got {labels}")
    return rows[labels[0]]


def _num_words(label: str) -> int:
    return label.count(":") + 1


def line_of(cells: Sequence[object]) -> str:
    """A row in Markdown; words with alternatives, `every=2|4`, stay in their cell."""
    escaped = (str(cell).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def planned_bytes(label: str, num_workers: int, numel: int, density: float | None = None) -> float:
    """What `regtopk plan` says that a rank receives per step; values have 4 bits unless the words say it."""
    words = Method.parse(label)
    share = float(density or words.options["density"] or 0)
    method = PlannedMethod.of(words, share, str(words.options.get("value_code") or "4bit"))
    return exchange_of(method, Workload.of_size(numel), num_workers).received_bytes_per_step


def received_bytes(row: Row) -> float | None:
    """What a worker receives per step; older records have the payload, from which it follows for some."""
    if row.get("received_bytes_per_step"):
        return float(row["received_bytes_per_step"])
    payload, others = row["payload_bytes_per_step"], row["num_workers"] - 1
    algorithm = Method.read(row["method"]).algorithm
    if algorithm == "dense":
        return float(2 * others / row["num_workers"] * payload)  # a ring all_reduce
    return float(others * payload) if algorithm in GATHERED else None
