"""What do the links carry while all workers send at once, frame by frame, on one machine?

A planner must be told the bandwidth that a link has, not the one that is printed on it: four times a gigabit
is more frames than two cores switch. See link_check.py.

    sudo python -m benchmarks.slow_network.throughput --out benchmarks/results/slow-network-throughput.json
"""

import argparse
import json
from pathlib import Path

from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.links import links_of
from benchmarks.slow_network.namespaces import signals_raise
from benchmarks.slow_network.results import hardware
from regtopk.lab.plan.units import format_bandwidth, parse_bandwidth

KEYS = ("bandwidth_bits_per_s", "achieved_bits_per_s")
COMMAND = "python -m benchmarks.slow_network.throughput"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--links", nargs="+", default=["10Mbit", "100Mbit", "1Gbit"])
    parser.add_argument("--out", type=Path, help="write JSON here")
    options = parser.parse_args()
    rows = []
    with signals_raise():
        for num_workers in options.workers:
            with links_of(num_workers, shaper="tc") as links:
                job = {
                    "bandwidths_bits_per_s": [parse_bandwidth(text) for text in options.links],
                    "latency_s": 0.0,
                }
                for row in launch("benchmarks.slow_network.link_check", job, links):
                    print(num_workers, *(format_bandwidth(row[key]) for key in KEYS), flush=True)
                    rows.append(row)
    if options.out is not None:
        content = {"command": COMMAND, "hardware": hardware(), "links": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
