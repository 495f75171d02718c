"""What a delay hides of a slow link, what it costs in loss, and what fragments do to the link's peaks.

A GPT learns on links of 100 and 10 Mbit/s with 50 ms one way, and on links that are not shaped. All methods
send as many bytes per step, with one learning rate. What a run learns is the same on every link, bit for bit,
so losses are compared on the unshaped ones, after more steps.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.slow_network.gpt_plan import Plan
from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.library import library_sources
from benchmarks.slow_network.links import Links
from benchmarks.slow_network.results import Results, Row
from regtopk.lab.experiments.data.text import load_text

METHODS = (
    "updates:4",
    "updates:4:delay=1",
    "updates:4:delay=2",
    "updates:4:fragments=4",
    "updates:4:delay=1:fragments=4",
)
ALONE = "updates:64"  # its first round is in the warm-up, and no other is timed: steps without an exchange
KINDS = ("losses", "steps")
LATENCY_S = 0.05
BANDWIDTHS = (100e6, 10e6)
LR, BATCH_SIZE, STRETCH = 0.001, 4, 8
PLAN = Plan(num_steps=96, warm_up=32)
LinksOf = Callable[[int, float], AbstractContextManager[Links]]


def measure(options: argparse.Namespace, command: str, links_of: LinksOf) -> str:
    """Losses and steps on unshaped links, then steps on slow ones; the table."""
    # refuses a file that is no text
    load_text(options.data, sources=library_sources, window=PLAN.context + 1)
    results = Results(options.out, command, KINDS)
    results.content["plan"] = {"lr": LR, "batch_size": BATCH_SIZE, "stretch": STRETCH, "latency_s": LATENCY_S}
    num_steps = 8 if options.quick else PLAN.num_steps
    seeds = (1,) if options.quick else (1, 2)
    with links_of(options.workers, 0.0) as links:
        losses = [_run(m, None, seed, num_steps) for seed in seeds for m in METHODS]
        for row in _rows(losses, links, options):
            results.add("losses", row)
        for row in _rows([_timed(m, None, options) for m in (ALONE, *METHODS)], links, options):
            results.add("steps", row)
    with links_of(options.workers, LATENCY_S) as links:
        for row in _rows([_timed(m, b, options) for b in BANDWIDTHS for m in METHODS], links, options):
            results.add("steps", row)
    results.write()
    return table(json.loads(json.dumps(results.content)))


def _run(method: str, bandwidth: float | None, seed: int, num_steps: int) -> dict[str, Any]:
    run = {"method": method, "lr": LR, "seed": seed, "bandwidth_bits_per_s": bandwidth}
    sizes = {"batch_size": BATCH_SIZE, "stretch": num_steps, "num_steps": num_steps}
    return {**run, **sizes, "target": None}


def _timed(method: str, bandwidth: float | None, options: argparse.Namespace) -> dict[str, Any]:
    run = {"method": method, "lr": LR, "seed": 1, "bandwidth_bits_per_s": bandwidth}
    sizes = {"batch_size": BATCH_SIZE, "stretch": STRETCH, "seconds": 1e9}
    return {**run, **sizes, "most_stretches": 2 if options.quick else 4}


def _rows(runs: list[dict[str, Any]], links: Links, options: argparse.Namespace) -> Iterator[Row]:
    data = options.data and str(options.data)
    job = {"plan": vars(PLAN), "runs": runs, "latency_s": links.latency_s, "data": data}
    for row in launch("benchmarks.slow_network.gpt_training", job, links):
        loss = f", test loss {row['curve'][-1][1]:.4f}" if "curve" in row else ""
        said = f"{row['method']} on {row['bandwidth_bits_per_s'] or 'unshaped'}: {row['step_s']:.3f} s a step"
        print(said + loss, file=sys.stderr, flush=True)
        yield row


def table(content: dict[str, Any]) -> str:
    """Steps per second over those of the same method on unshaped links; losses; the busiest 100 ms."""
    losses, steps = content["losses"], content["steps"]
    step_s = {(row["method"], row["bandwidth_bits_per_s"]): row for row in steps}
    links = ", ".join(f"{b / 1e6:g} Mbit/s" for b in BANDWIDTHS)
    lines = [
        f"| method | step, ms | rate on {links}, {LATENCY_S * 1e3:g} ms | loss | busiest 100 ms, kB |",
        "|---|---:|---:|---:|---:|",
    ]
    base = step_s[METHODS[0], None]["step_s"]
    for method in METHODS:
        rates = ", ".join(f"{base / step_s[method, b]['step_s']:.3f}" for b in BANDWIDTHS)
        own = [row["curve"][-1][1] for row in losses if row["method"] == method]
        peak = step_s[method, BANDWIDTHS[0]]["busiest_bytes"] / 1e3
        ms = 1e3 * step_s[method, None]["step_s"]
        lines.append(f"| {method} | {ms:.0f} | {rates} | {sum(own) / len(own):.4f} | {peak:.1f} |")
    lines.append(f"\nA step without an exchange takes {1e3 * step_s[ALONE, None]['step_s']:.0f} ms.")
    return "\n".join(lines)
