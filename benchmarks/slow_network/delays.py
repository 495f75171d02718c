"""What a delay hides of a slow link, what it costs in loss, and what fragments do to the link's peaks.

A GPT learns on links of 100 and 10 Mbit/s with 50 ms one way, and on links that are not shaped. All methods
send as many bytes per step, with one learning rate. What a run learns is the same on every link, bit for bit,
so losses are compared on the unshaped ones, after more steps.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.links import Links, links_of
from benchmarks.slow_network.results import Results, Row
from regtopk.core.codes import full_message_bytes
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.settings import settings_of
from regtopk.lab.experiments.tasks.deep import Gpt

METHODS = (
    "updates:4",
    "updates:4:delay=1",
    "updates:4:delay=2",
    "updates:4:fragments=4",
    "updates:4:delay=1:fragments=4",
)
ALONE = "updates:64"  # its first round is not reached: steps without an exchange
KINDS = ("losses", "steps")
LATENCY_S = 0.05
BANDWIDTHS = (100e6, 10e6)
LR, BATCH_SIZE, STRETCH, NUM_STEPS = 0.001, 4, 8, 192
NUM_TESTED = 128  # windows of the test: ranks on a processor evaluate for long
BYTES_PER_PARAMETER = 0.008  # of a rank's message, by local step
IMPUTE, VALUE_CODE = 0.35, "4bit"


def measure(options: argparse.Namespace, command: str) -> str:
    """Losses and steps on unshaped links, then steps on slow ones; the table."""
    num_steps = 2 * STRETCH if options.quick else NUM_STEPS
    config = CompareConfig(
        task="gpt", algorithms="topk", num_workers=options.workers, num_steps=num_steps,
        batch_size=BATCH_SIZE, num_layers=2, width=384, context=32, lr=(LR,), data=options.data,
    )  # fmt: skip
    results = Results(options.out, command, KINDS)
    results.content["plan"] = {"lr": LR, "batch_size": BATCH_SIZE, "stretch": STRETCH, "latency_s": LATENCY_S}
    with tempfile.TemporaryDirectory() as folder:
        examples = str(Path(folder) / "examples.pt")
        job = {"config": settings_of(config), "device": "cpu", "examples": examples}
        numel = _save_examples(config, examples)
        num_stretches = 2 if options.quick else 4

        def run(method: str, bandwidth: float | None, seed: int = 1) -> dict[str, Any]:
            words = f"{words_of(method, numel)}:lr={LR}"
            return {"method": method, "words": words, "bandwidth_bits_per_s": bandwidth, "seed": seed}

        def timed(method: str, bandwidth: float | None) -> dict[str, Any]:
            times = {"stretch": STRETCH, "num_stretches": num_stretches, "is_watched": True}
            return {**run(method, bandwidth), **times, "warm_up": 0 if method == ALONE else STRETCH}

        ends: dict[str, Any] = {"stops": [config.num_steps], "target": None, "needed": None, "warm_up": 0}
        ends |= {"timed_steps": config.num_steps, "most_seconds": 0.0}
        seeds = (1,) if options.quick else (1, 2)
        with links_of(options.workers, 0.0, options.shaper) as links:
            for row in _rows([run(m, None, seed) | ends for seed in seeds for m in METHODS], job, links):
                results.add("losses", row)
            for row in _rows([timed(m, None) for m in (ALONE, *METHODS)], job, links):
                results.add("steps", row)
        with links_of(options.workers, LATENCY_S, options.shaper) as links:
            for row in _rows([timed(m, b) for b in BANDWIDTHS for m in METHODS], job, links):
                results.add("steps", row)
    results.write()
    return table(json.loads(json.dumps(results.content)))


def every_of(method: str) -> int:
    """Steps of a round."""
    return int(method.split(":")[1])


def words_of(method: str, numel: int) -> str:
    """A method of the measurement in the words of `regtopk compare` and `regtopk plan`."""
    density = num_entries(numel, every_of(method)) / numel
    words = f"topk:density={density}:value_code={VALUE_CODE}:impute={IMPUTE}:exchange=updates"
    return ":".join([words, f"every={every_of(method)}", *method.split(":")[2:]])


def num_entries(numel: int, every: int) -> int:
    """The most entries whose message keeps to `BYTES_PER_PARAMETER`, by bisection."""
    codes: dict[str, Any] = {"dtype": torch.float32, "value_code": VALUE_CODE, "index_code": "elias-fano"}
    low, high = 1, numel
    while low < high:
        middle = (low + high + 1) // 2
        fits = full_message_bytes(middle, numel, **codes) <= BYTES_PER_PARAMETER * every * numel
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _save_examples(config: CompareConfig, path: str) -> int:
    """Read the text once for all ranks; the number of parameters of the network."""
    examples = Gpt.load(config)
    stride = max(1, len(examples.test) // NUM_TESTED)
    examples = examples._replace(test=examples.test[::stride], test_targets=examples.test_targets[::stride])
    torch.save(tuple(examples), path)
    return sum(p.numel() for p in Gpt.make_network(config, examples, seed=0).parameters())


def _rows(runs: list[dict[str, Any]], job: dict[str, Any], links: Links) -> Iterator[Row]:
    whole = {**job, "runs": runs, "latency_s": links.latency_s}
    for row in launch("benchmarks.slow_network.gpt_training", whole, links):
        loss = f", test loss {row['curve'][-1][2]:.4f}" if "curve" in row else ""
        said = f"{row['method']} on {row['bandwidth_bits_per_s'] or 'unshaped'}: {row['step_s']:.3f} s a step"
        print(said + loss, file=sys.stderr, flush=True)
        yield {**row, "shaper": links.shaper}


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
        own = [row["curve"][-1][-1] for row in losses if row["method"] == method]
        peak = step_s[method, BANDWIDTHS[0]]["busiest_bytes"] / 1e3
        ms = 1e3 * step_s[method, None]["step_s"]
        lines.append(f"| {method} | {ms:.0f} | {rates} | {sum(own) / len(own):.4f} | {peak:.1f} |")
    lines.append(f"\nA step without an exchange takes {1e3 * step_s[ALONE, None]['step_s']:.0f} ms.")
    return "\n".join(lines)
