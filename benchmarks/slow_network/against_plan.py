"""Does `regtopk plan` say what was measured? The tables of docs/when-it-pays.md, from the recorded files.

The planner knows the parameters' shapes, the bandwidth the links have while all workers send
(slow-network-throughput.json, throughput.py), the step without an exchange (compute_s of the recorded row)
and what work costs on that machine when N workers share it, in slow-network-calibration-N.json. Those were
measured by an earlier planner, which timed the processor while N workers were at work, and every algorithm.
Their seconds are here by the units of today's, with "step" in the others. The line "peer-topk" is of
torch.topk and an index_add_.

    python -m benchmarks.slow_network.against_plan [--into docs/when-it-pays.md]
"""

import argparse
import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import gpu_against_plan
from benchmarks.slow_network.models import resnet18_shapes
from benchmarks.slow_network.results import accuracy_table
from regtopk.core.link import Link
from regtopk.lab.plan.costs import RECORDED, Calibration
from regtopk.lab.plan.exchange import PlannedExchange, Work, Workload, exchange_of, num_buckets
from regtopk.lab.plan.link import WIRE_BYTES_PER_BYTE, all_gather
from regtopk.lab.plan.methods import DENSE, FP16, POWERSGD, PlannedMethod, planned_methods
from regtopk.lab.plan.predict import Situation, make_plan, step_time_s
from regtopk.lab.plan.units import format_bandwidth, format_time

RESULTS = Path(__file__).parents[1] / "results"
UNSHAPED_BITS_PER_S = 1e15  # no link at all: what is left is the machine's own work
BLOCK = re.compile(r"<!-- made: ([a-z-]+) -->.*?<!-- end -->", flags=re.DOTALL)
MODELS = ((11_173_962, 0.05), (124_000_000, 0.3), (1_500_000_000, 3.0))  # parameters, and seconds of a step
WORKERS = (2, 8, 64)
BANDWIDTHS = (1e8, 1e9, 1e10)
LATENCY_S = 1e-4
Cell = Callable[[dict[str, Any]], str]
TORCH = {"dense": DENSE, "fp16": FP16, "powersgd": POWERSGD}


def compare(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Every recorded step time with the planner's, `off` being the relative difference.

    The planner has no say on rows whose sum was split although a gather moves less.
    """
    workload = Workload.of_shapes(resnet18_shapes())
    measured = json.loads((results / "slow-network.json").read_text(encoding="utf-8"))["steps"]
    rows = [row for row in measured if row["params"] == workload.numel]
    num_workers = sorted({row["workers"] for row in rows})
    costs = {n: Calibration.read(results / f"slow-network-calibration-{n}.json") for n in num_workers}
    links = json.loads((results / "slow-network-throughput.json").read_text(encoding="utf-8"))["links"]
    achieved = {
        (link["workers"], link["bandwidth_bits_per_s"]): link["achieved_bits_per_s"] for link in links
    }
    for row in rows:
        payload_bits_per_s = achieved.get((row["workers"], row["bandwidth_bits_per_s"]), UNSHAPED_BITS_PER_S)
        bandwidth = WIRE_BYTES_PER_BYTE * payload_bits_per_s  # the planner's has headers in it
        link = Link(bandwidth, row["latency_s"], row["compute_s"])
        exchange = _exchange(row, workload)
        row["is_planned"] = row["collective"] == exchange.collective
        row["predicted_s"] = step_time_s(exchange, link, costs[row["workers"]])
        row["off"] = row["predicted_s"] / row["step_s"] - 1
    return rows


def _exchange(row: dict[str, Any], workload: Workload) -> PlannedExchange:
    """What a recorded method does in a step."""
    N, numel = row["workers"], workload.numel
    if row["method"] != "peer-topk":
        own = PlannedMethod(row["method"], row["density"], row["value_code"])
        return exchange_of(TORCH.get(row["method"], own), workload, N)
    num_parts = num_buckets(numel)
    k = round(row["density"] * numel)  # torch.topk of each bucket, 32-bit indices and values gathered
    ddp = Work("ddp", {"numel": numel / num_parts})
    topk = Work("peer-topk", {"numel": numel / num_parts, "entries": N * k / num_parts})
    moves = [all_gather(4 * k / num_parts, N)] * 2
    return PlannedExchange("all_gather", 8 * k, moves, [ddp, topk], num_parts)


def tables(rows: list[dict[str, Any]], results: Path = RESULTS) -> dict[str, str]:
    """The blocks of the page, by name."""
    planned = [row for row in rows if row["is_planned"]]
    most = [row for row in rows if row["workers"] == max(row["workers"] for row in rows)]
    return {
        "speed-up": _by_workers(most, "speed-up over no hook, measured", _speedup_cell(rows)),
        "planned": _how_far_off(planned),
        "break-even": _break_even(results),
        "gpu": gpu_against_plan.how_near(gpu_against_plan.compare(Calibration.read(RECORDED), results)),
        "accuracy": accuracy_table(
            json.loads((results / "slow-network.json").read_text())["time_to_accuracy"]
        ),
    }


def _how_far_off(rows: list[dict[str, Any]]) -> str:
    off = sorted(abs(row["off"]) for row in rows)
    within = sum(o <= 0.3 for o in off)
    return (
        f"{within} of {len(off)} predictions are within 30 %, half of them within "
        f"{100 * off[len(off) // 2]:.0f} %; the worst is off by {100 * off[-1]:.0f} %."
    )


def _by_workers(rows: list[dict[str, Any]], title: str, cell: Cell) -> str:
    parts = []
    for workers, latency_s in sorted({(row["workers"], row["latency_s"]) for row in rows}):
        group = [row for row in rows if (row["workers"], row["latency_s"]) == (workers, latency_s)]
        delay = f", {format_time(latency_s)} one way" if latency_s else ""
        parts.append(f"{workers} workers{delay}, {title}:\n\n{_table(group, cell)}")
    return "\n\n".join(parts)


def _break_even(results: Path) -> str:
    """The planner's answers for models and clusters whose workers have a core each of that machine."""
    costs = Calibration.read(results / "slow-network-calibration-2.json")
    methods = planned_methods((0.001,))
    heads = [f"{format_bandwidth(bandwidth)}" for bandwidth in BANDWIDTHS]
    lines = [
        f"| parameters, step | workers | break-even | {' | '.join(heads)} |",
        "|---|---:|---:|---|---|---|",
    ]
    for (numel, compute_s), num_workers in product(MODELS, WORKERS):
        link = Link(BANDWIDTHS[0], LATENCY_S, compute_s)
        here = Situation(Workload.of_size(numel), num_workers, link)
        plans = [make_plan(here.at(bandwidth=b), costs, methods) for b in BANDWIDTHS]
        best = [f"{p.best.method.name} {p.speedup_to_loss(p.best):.3g}" for p in plans]
        even = plans[0].break_even_bits_per_s
        shown = "pays at none" if even is None else format_bandwidth(even)
        lines.append(
            f"| {numel:,}, {format_time(compute_s)} | {num_workers} | {shown} | {' | '.join(best)} |"
        )
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]], cell: Cell) -> str:
    """One row a method, one column a link."""
    links = list(dict.fromkeys(row["bandwidth_bits_per_s"] for row in rows))
    cells = {(_name(row), row["bandwidth_bits_per_s"]): cell(row) for row in rows}
    heads = ["unshaped" if link is None else format_bandwidth(link) for link in links]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(links)]
    for name in dict.fromkeys(_name(row) for row in rows):
        lines.append(f"| {name} | {' | '.join(cells.get((name, link), '') for link in links)} |")
    return "\n".join(lines)


def _speedup_cell(rows: list[dict[str, Any]]) -> Cell:
    dense = {_link(row): row["step_s"] for row in rows if row["method"] == "dense"}
    return lambda row: f"{dense[_link(row)] / row['step_s']:.3g}"


def _link(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["workers"], row["latency_s"], row["bandwidth_bits_per_s"]


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


def put_into(page: str, blocks: dict[str, str]) -> str:
    """The page with its marked blocks made anew."""

    def write(found: re.Match[str]) -> str:
        name = found[1]  # other tables are made elsewhere
        return f"<!-- made: {name} -->\n\n{blocks[name]}\n\n<!-- end -->" if name in blocks else found[0]

    return BLOCK.sub(write, page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, help="a page that has the marks; printed if not given")
    options = parser.parse_args()
    blocks = tables(compare())
    if options.into is None:
        print("\n\n".join(blocks.values()))
    else:
        page = options.into.read_text(encoding="utf-8")
        options.into.write_text(put_into(page, blocks), encoding="utf-8")


if __name__ == "__main__":
    main()
