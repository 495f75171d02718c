"""Does `regtopk plan` say what was measured on a GPU? Predictions beside the records of two benchmarks.

exchange-cuda*.json (benchmarks/exchange.py) have whole exchanges of one rank, collectives left out.
fsdp-step-cuda*.json (benchmarks/fsdp_step.py) have steps of a GPT, told the planner without a hook.
There "2 x 1" are two processes that share the GPU and talk by gloo, which is not what is planned for GPUs.
Costs are those that the package has of a GPU, or another file's. The package's come from the same records of
exchanges (benchmarks/gpu_costs.py).

    python -m benchmarks.gpu_against_plan [--calibration FILE] [--results FOLDER]
"""

import argparse
import json
import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from regtopk.lab.plan.costs import RECORDED, Calibration
from regtopk.lab.plan.exchange import Workload, exchange_of
from regtopk.lab.plan.methods import POWERSGD, PlannedMethod
from regtopk.rounds import GRADIENTS, Rounds

RESULTS = Path(__file__).parent / "results"
WITHIN, DEPTH = 0.3, 64
UPDATES = Rounds("updates", 1)
NAMES = {"RegTop-k": "regtopk", "Top-k": "topk"}
VARIANTS = {"Top-k 1 %, 4-bit": ("topk", 0.01, "4bit"), "RegTop-k 0.1 %": ("regtopk", 0.001, "float32")}


class Row(NamedTuple):
    """A record beside its prediction, in seconds; `without` is the part that the planner was told."""

    name: str
    predicted_s: float
    recorded_s: float
    without_s: float = 0.0

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.recorded_s

    def __str__(self) -> str:
        added = [seconds - self.without_s for seconds in (self.predicted_s, self.recorded_s)]
        times = f"{1e3 * self.predicted_s:.2f} ms | {1e3 * self.recorded_s:.2f} ms | {self.ratio:.2f}"
        return f"| {self.name} | {times} | {added[0] / added[1]:.2f} |"


def work_s(costs: Calibration, method: PlannedMethod, workload: Workload, num_workers: int) -> float:
    """An exchange without its collectives, and without DDP's own part."""
    works = exchange_of(method, workload, num_workers).work
    return sum(costs.seconds(work) for work in works if work.line != "ddp")


def square_layers(numel: int) -> Workload:
    """The network of benchmarks/exchange.py."""
    width = round(math.sqrt(numel / DEPTH))
    return Workload.of_shapes([(width, width), (width,)] * DEPTH)


def exchanges(record: dict[str, Any], costs: Calibration) -> Iterator[Row]:
    """Of benchmarks/exchange.py."""
    words = record["command"].split()
    told = dict(pairwise(words))
    density, num_workers = float(told["--density"]), int(told["--workers"])
    code = told.get("--value-code", "float32")
    for row in record["results"]:
        algorithm, _, kind = row["exchange"].partition(", ")
        method = POWERSGD
        if kind:
            rounds = UPDATES if kind == "updates" else GRADIENTS
            method = PlannedMethod(NAMES[algorithm], density, code, rounds)
        predicted_s = work_s(costs, method, square_layers(row["numel"]), num_workers)
        name = f"{row['exchange']}, {density:g} in {code}, J = {row['numel']:,}"
        yield Row(name, predicted_s, row["ms"] / 1e3)


def steps(record: dict[str, Any], costs: Calibration) -> Iterator[Row]:
    """Of benchmarks/fsdp_step.py; not where NCCL takes sockets between two ranks of one device."""
    for setting in (each for each in record["settings"] if "2 x 1, nccl" not in each["setting"]):
        without, *others = setting["results"]
        for row in others:
            method = next(PlannedMethod(*VARIANTS[name]) for name in VARIANTS if name in row["variant"])
            num_workers = int(setting["setting"].split(" x ")[0])
            added_s = work_s(costs, method, Workload.of_size(setting["numel"]), num_workers)
            name = f"{setting['setting']}: {row['variant']}"
            yield Row(name, without["step_s"] + added_s, row["step_s"], without["step_s"])


def compare(costs: Calibration, results: Path = RESULTS) -> list[Row]:
    """All rows of both."""
    found: list[Row] = []
    for rows_of, names in ((exchanges, "exchange-cuda{}.json"), (steps, "fsdp-step-cuda{}.json")):
        for kind in ("", "-again", "-4bit"):
            if (path := results / names.format(kind)).exists():
                found += rows_of(json.loads(path.read_text()), costs)
    return found


def how_near(rows: list[Row]) -> str:
    """How many are near, and how far off the others are."""
    near, far = (
        [row for row in rows if (abs(row.ratio - 1) <= WITHIN) is is_near] for is_near in (True, False)
    )
    said = f"{len(near)} of {len(rows)} predictions are within {100 * WITHIN:.0f} % of the record"
    return (
        f"{said}; the others are {', '.join(f'{row.ratio:.2f}' for row in far)} times it."
        if far
        else f"{said}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, default=RECORDED)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = compare(Calibration.read(options.calibration), options.results)
    print("| | predicted | recorded | predicted / recorded | of what the exchange adds |")
    print("|---|---:|---:|---:|---:|", *rows, sep="\n")
    print(f"\n{how_near(rows)}")


if __name__ == "__main__":
    main()
