"""Does `regtopk plan` say what updates cost on slow links? The table of docs/planning.md, from records.

slow-network-delays.json has the measured steps, and the step without an exchange that the planner is told.
The costs of work on that machine, when four workers share it, are in slow-network-delays-calibration.json: an
earlier planner measured them, and they are there by the units of today's, with "step" in the others.

    python -m benchmarks.slow_network.delays_against_plan
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.slow_network.against_plan import UNSHAPED_BITS_PER_S
from benchmarks.slow_network.delays import ALONE, BANDWIDTHS, LATENCY_S, METHODS, words_of
from regtopk.core.link import Link
from regtopk.lab.plan.costs import Calibration
from regtopk.lab.plan.exchange import Workload
from regtopk.lab.plan.methods import TORCH, planned_methods
from regtopk.lab.plan.predict import Situation, predict

RESULTS = Path(__file__).parents[1] / "results"
LINKS = ((None, 0.0), *((bandwidth, LATENCY_S) for bandwidth in BANDWIDTHS))


def table(steps: list[dict[str, Any]], costs: Calibration) -> str:
    """Measured and predicted steps of each method, on each link."""
    measured = {(row["method"], row["bandwidth_bits_per_s"]): row["step_s"] for row in steps}
    numel, workers = steps[0]["params"], steps[0]["workers"]
    names = [f"{b / 1e6:g} Mbit/s" if b else "unshaped" for b, _ in LINKS]
    lines = ["| method | " + " | ".join(names) + " |", "|---|" + "---:|" * len(LINKS)]
    for method in METHODS:
        ways = [way for way in planned_methods(labels=[words_of(method, numel)]) if way not in TORCH]
        cells = []
        for bandwidth, latency_s in LINKS:
            link = Link(bandwidth or UNSHAPED_BITS_PER_S, latency_s, measured[ALONE, None])
            situation = Situation(Workload.of_size(numel), workers, link)
            predicted = min(predict(way, situation, costs).step_time_s for way in ways)
            own = measured[method, bandwidth]
            cells.append(f"{1e3 * own:.0f} ms / {1e3 * predicted:.0f} ms ({predicted / own - 1:+.0%})")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    steps = json.loads((RESULTS / "slow-network-delays.json").read_text())["steps"]
    print(table(steps, Calibration.read(RESULTS / "slow-network-delays-calibration.json")))


if __name__ == "__main__":
    main()
