"""What does work cost on a GPU? The planner's costs of an H200, put together from other benchmarks' records.

They stand in until a calibration on a GPU replaces the file, which knows all of them:

    regtopk plan --params 124M --workers 8 --bandwidth 1Gbit/s --step-time 300ms --device cuda \\
        --recalibrate --calibration src/regtopk/lab/plan/gpu.json

Passes (copies) and selections come from kernels-cuda-plain.json. Coding, summing and PowerSGD come from
exchange-cuda*.json, where float32 and 4-bit values share a line. So does what a step takes beside: the median
of what is left of these exchanges, so the median error of gpu_against_plan is small by itself. Of the rest
there is no record: knowing who sent an entry is taken to cost nothing more, a dense sum as much per entry as
a sparse one, DDP a pass, and torch's fp16 hook two.

    python -m benchmarks.gpu_costs
"""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_against_plan import exchanges as predicted
from regtopk.lab.plan.costs import RECORDED, Calibration, Line, fit
from regtopk.lab.plan.exchange import Units, numel_units

RESULTS = Path(__file__).parent / "results"
CODED = [f"{code}{senders}" for code in ("float32", "4bit") for senders in ("", " senders")]
ASSUMED = "what senders and dense sums cost, and DDP's own work"
MESSAGES = ("encode", "decode", "sum")  # passes that make and read them


def make() -> Calibration:
    """The costs, by the units of today's planner."""
    kernels = _read("kernels-cuda-plain")
    exchanges = [_read(f"exchange-cuda{kind}") for kind in ("", "-again", "-4bit")]
    points: dict[str, list[tuple[Units, float]]] = defaultdict(list)
    for row in kernels["results"]:
        took, numel = row["plain_launches"]["median_s"], row["numel"]
        points["pass"].append((numel_units(numel), took["copy"]))
        points["select"].append(({"calls": 1, "entries": row["k"], **numel_units(numel)}, took["Top-k"]))
    for record in exchanges:
        density, num_workers = (_option(record, name) for name in ("density", "workers"))
        for row in record["results"]:
            numel, took = row["numel"], {each["pass"]: each["ms"] / 1e3 for each in row["passes"]}
            if row["exchange"] == "torch PowerSGD":
                points["powersgd"].append(({"messages": 64, **numel_units(numel)}, row["ms"] / 1e3))
                continue
            units = {"calls": 1, "entries": (1 + num_workers) * round(density * numel), "numel": numel}
            points["sparse"].append((units, sum(took[name] for name in MESSAGES)))
    found = {name: fit(times) for name, times in points.items()}
    per_entry = {unit: found["sparse"][unit] for unit in ("calls", "entries")}
    step: Line = {"calls": 0.0}  # until all else is known
    lines: dict[str, Line] = {"step": step}
    lines |= {name: found[name] for name in ("pass", "powersgd")}
    lines |= {"ddp": found["pass"], "fp16": {unit: 2 * cost for unit, cost in found["pass"].items()}}
    lines |= {f"{work} {code}": found[work] for work in ("select", "sparse") for code in CODED}
    lines |= {"sparse none": per_entry, "dense float32": per_entry, "dense 4bit": per_entry}
    machine = {name: exchanges[0][name] for name in ("device", "torch")}
    costs = Calibration({**machine, "made_by": "python -m benchmarks.gpu_costs", "assumed": ASSUMED}, lines)
    rows = [row for record in exchanges for row in predicted(record, costs) if "PowerSGD" not in row.name]
    step = {"calls": median(row.recorded_s - row.predicted_s for row in rows)}
    return replace(costs, lines={**lines, "step": step})


def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def _option(record: dict[str, Any], name: str) -> float:
    words = record["command"].split()
    return float(words[words.index(f"--{name}") + 1])


if __name__ == "__main__":
    make().write(RECORDED)
