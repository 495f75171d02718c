"""What `kernels.py` measured, as the Markdown table of docs/kernels.md.

python benchmarks/kernel_tables.py benchmarks/results/kernels-*.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from kernels import FLOOR, REGTOPK, TOPK

COLUMNS = (
    "device", "N x J", "density", "add", "Top-k", "RegTop-k", "launched one by one", "times the add",
    "faster than plain torch", "RegTop-k over Top-k", "temporaries",
)  # fmt: skip


def row(report: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Times in ms, of a captured graph where there is one."""
    plain = result["plain_launches"]
    found = result.get("graph", plain)
    ms = {name: f"{1e3 * seconds:.3g}" for name, seconds in found["median_s"].items()}
    one_by_one = f"{1e3 * plain['median_s'][REGTOPK]:.3g}" if "graph" in result else ""
    over, faster = found["times_the_add"], found["times_faster_than_plain"]
    num_rows = result["num_rows"]
    limit = num_rows * result["numel"] / 16
    return [
        report["device"] if "graph" in result else f"CPU, {report['num_threads']} threads",
        f"{num_rows} x {result['numel']:,}" if num_rows > 1 else f"{result['numel']:,}",
        f"{result['density']:g}",
        ms[FLOOR],
        ms[TOPK],
        ms[REGTOPK],
        one_by_one,
        f"{over[TOPK]:.2f}, {over[REGTOPK]:.2f}",
        f"{faster[TOPK]:.1f}, {faster[REGTOPK]:.1f}",
        f"{100 * (found['regtopk_over_topk'] - 1):+.1f} %",
        f"{max(result['temporary_bytes'].values()) / limit:.2f}",
    ]


def main() -> None:
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in sys.argv[1:]:
        report = json.loads(Path(name).read_text(encoding="utf-8"))
        for result in report["results"]:
            print(f"| {' | '.join(row(report, result))} |")


if __name__ == "__main__":
    main()
