"""Does `regtopk plan` say what was measured? The recorded step times beside the planner's, as a table.

The planner knows the parameters' shapes, the link, the step without an exchange (compute_s of the recorded
row) and what work costs on that machine when N workers share it, in slow-network-calibration-N.json, made by

    regtopk plan --params 11173962 --workers N --bandwidth 100Mbit --step-time 50ms --local-workers N \
        --threads 1 --recalibrate --calibration benchmarks/results/slow-network-calibration-N.json

    python -m benchmarks.slow_network.against_plan [--into docs/when-it-pays.md]
"""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.slow_network.models import resnet18_shapes
from regtopk.core.link import Link
from regtopk.plan import cache
from regtopk.plan.methods import DENSE, FP16, POWERSGD, Method, Situation, predict
from regtopk.plan.units import format_bandwidth, format_time
from regtopk.plan.workload import Workload

RESULTS = Path(__file__).parents[1] / "results"
UNSHAPED_BITS_PER_S = 1e15  # no link at all: what is left is the machine's own work
BEGIN, END = "<!-- made by benchmarks.slow_network.against_plan -->", "<!-- end -->"
TORCH = {"dense": DENSE, "fp16": FP16, "powersgd": POWERSGD}


def compare(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Every recorded step time with the planner's, `off` being the relative difference."""
    workload = Workload(tuple(resnet18_shapes()))
    measured = json.loads((results / "slow-network.json").read_text(encoding="utf-8"))["steps"]
    rows = [row for row in measured if row["params"] == workload.numel]
    num_workers = sorted({row["workers"] for row in rows})
    costs = {n: cache.read(results / f"slow-network-calibration-{n}.json") for n in num_workers}
    for row in rows:
        method = TORCH.get(row["method"]) or Method(
            row["method"], row["density"], row["value_code"], row["collective"]
        )
        link = Link(row["bandwidth_bits_per_s"] or UNSHAPED_BITS_PER_S, row["latency_s"], row["compute_s"])
        found = predict(method, Situation(workload, row["workers"], link), costs[row["workers"]])
        row["predicted_s"] = found.step_time_s
        row["off"] = found.step_time_s / row["step_s"] - 1
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """One row a method, a column a link, for each number of workers and latency."""
    parts = []
    for workers, latency_s in sorted({(row["workers"], row["latency_s"]) for row in rows}):
        group = [row for row in rows if (row["workers"], row["latency_s"]) == (workers, latency_s)]
        delay = f", {format_time(latency_s)} one way" if latency_s else ""
        parts.append(f"{workers} workers{delay}, measured / predicted:\n\n{_table(group)}")
    off = sorted(abs(row["off"]) for row in rows)
    within = sum(o <= 0.3 for o in off)
    parts.append(
        f"{within} of {len(off)} predictions are within 30 %, half of them within "
        f"{100 * off[len(off) // 2]:.0f} %; the worst is off by {100 * off[-1]:.0f} %."
    )
    return "\n\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    links = list(dict.fromkeys(row["bandwidth_bits_per_s"] for row in rows))
    cells = {(_name(row), row["bandwidth_bits_per_s"]): row for row in rows}
    names = list(dict.fromkeys(_name(row) for row in rows))
    heads = ["unshaped" if link is None else format_bandwidth(link) for link in links]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(links)]
    for name in names:
        shown = [_cell(cells.get((name, link))) for link in links]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{format_time(row['step_s'])} / {format_time(row['predicted_s'])} ({100 * row['off']:+.0f} %)"


def _name(row: dict[str, Any]) -> str:
    words = {
        "dense": "no hook",
        "fp16": "torch fp16",
        "powersgd": "torch PowerSGD",
        "peer-topk": "peers' Top-k",
    }
    if row["method"] in words:
        return words[row["method"]]
    return f"{row['method']}, {row['value_code']}, {row['collective']}"


def put_into(page: str, made: str) -> str:
    """The page with the part between the marks made anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, help="a page that has the marks; printed if not given")
    options = parser.parse_args()
    made = table(compare())
    if options.into is None:
        print(made)
    else:
        page = options.into.read_text(encoding="utf-8")
        options.into.write_text(put_into(page, made), encoding="utf-8")


if __name__ == "__main__":
    main()
