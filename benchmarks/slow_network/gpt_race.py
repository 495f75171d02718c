"""Time to a loss on a shaped link by real ranks: methods as they were picked in the simulator."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import torch

from benchmarks.slow_network.gpt_picked import Picked, Recorded, read_picked
from benchmarks.slow_network.gpt_plan import predicted_step_s, shared_costs
from benchmarks.slow_network.gpt_table import link_words, said, table
from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.links import Links, links_of
from benchmarks.slow_network.namespaces import NetworkError
from benchmarks.slow_network.results import Results
from regtopk.core.link import Link
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.settings import settings_of
from regtopk.lab.experiments.tasks.deep import Gpt
from regtopk.lab.plan.costs import Calibration

KINDS = ("link", "compute", "race")
WARM_UP = 3  # steps, and a round: DDP makes its buckets anew after the first
COMPUTE_STEPS, COMPUTE_STRETCHES = 8, 3
MOST_BUSY = 0.9  # of a core, that a relay may take


class GptRace:
    """The runs of one race. What the file of results holds is not run again.

    Args:
        options: of the command line.
        command: that the results name.
    """

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options = options
        self.recorded = read_picked(options.picked)
        self.target = self.recorded.target(options.target_of, options.target_at)
        self.results = Results(options.out, command, KINDS)
        settings = self.settings()
        if self.results.content.setdefault("settings", settings) != settings:
            raise ArgumentError(f"out must hold results of the same race, but {options.out} has another")

    def settings(self) -> dict[str, Any]:
        """What all rows of a file share."""
        options, config = self.options, self.recorded.config
        names = ("num_workers", "num_steps", "batch_size", "num_layers", "width", "context", "precision")
        rule = f"the mean loss of {options.target_of!r} after {options.target_at:g} of its steps"
        return {
            "picked": [str(folder) for folder in options.picked],
            "text_sha256": self.recorded.text_sha256,
            **{name: getattr(config, name) for name in names},
            "seed": self.seed,
            "target": self.target,
            "target_is": rule,
            "bandwidth_bits_per_s": options.link,
            "latency_s": options.latency,
            "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(),
        }

    @property
    def seed(self) -> int:
        """The first that all methods were recorded with."""
        shared = set.intersection(*(set(picked.curves) for picked in self.methods))
        if not shared:
            raise ArgumentError("picked must have a seed that all methods share, got none")
        return min(shared)

    @property
    def methods(self) -> list[Picked]:
        """That are raced: all, or those that the options name."""
        found, only = self.recorded.methods, self.options.only
        if unknown := set(only) - {m.label for m in found}:
            labels = [m.label for m in found]
            raise ArgumentError(f"only must be recorded methods, of {labels}, got {sorted(unknown)}")
        return [m for m in found if not only or m.label in only]

    def run(self) -> str:
        """Check the link, time the computation, race what is missing, and predict."""
        options, num_workers = self.options, self.recorded.config.num_workers
        with tempfile.TemporaryDirectory() as folder:
            examples = Path(folder) / "examples.pt"
            save_examples(self.recorded, options.data, examples)
            with links_of(num_workers, options.latency, options.shaper) as links:
                self.results.content["shaper"] = links.shaper
                if not self.results.content["link"]:
                    check_link(links, options.link, self.results)
                self._launch([*self._compute_runs(), *self._race_runs()], examples, links)
        self._predict()
        self.results.write()
        return table(self.results.content)

    def _compute_runs(self) -> Iterator[dict[str, Any]]:
        """Steps of each optimizer without an exchange, on all ranks at once."""
        config = self.recorded.config
        for name in dict.fromkeys(picked.method.optimizer for picked in self.methods):
            # its only round would come after the last step
            words = f"dense:exchange=updates:every={config.num_steps}:optimizer={name}:lr=0.001"
            stretch = min(COMPUTE_STEPS, (config.num_steps - 1) // COMPUTE_STRETCHES)
            times = {"stretch": stretch, "num_stretches": COMPUTE_STRETCHES, "warm_up": WARM_UP}
            yield {"method": name, "words": words, "bandwidth_bits_per_s": None, **times}

    def _race_runs(self) -> Iterator[dict[str, Any]]:
        options = self.options
        for picked in self.methods:
            needed = picked.steps_to(self.target, self.seed)
            yield {
                "method": picked.label,
                "words": picked.words,
                "warm_up": WARM_UP + picked.method.rounds.every,
                "stops": [step for step, _ in picked.curves[self.seed] if step > 0],
                "target": self.target,
                "needed": None if needed == inf else needed,
                "timed_steps": options.timed_steps,
                "most_seconds": options.most_seconds,
                "bandwidth_bits_per_s": options.link,
            }

    def _launch(self, runs: list[dict[str, Any]], examples: Path, links: Links) -> None:
        content = self.results.content
        done = {row["words"] for kind in ("compute", "race") for row in content[kind]}
        missing = [{**run, "seed": self.seed} for run in runs if run["words"] not in done]
        if not missing:
            return
        job = {
            "config": settings_of(self.recorded.config),
            "device": self.options.device,
            "examples": str(examples),
            "runs": missing,
            "latency_s": links.latency_s,
        }
        for row in launch("benchmarks.slow_network.gpt_training", job, links):
            self.results.add("race" if "curve" in row else "compute", row)
            print(said(row), file=sys.stderr, flush=True)

    def _predict(self) -> None:
        """What the planner says, beside what was measured."""
        content, options = self.results.content, self.options
        num_workers = self.recorded.config.num_workers
        if options.calibration is not None:
            costs = Calibration.read(options.calibration)
        elif "calibration" in content:
            costs = Calibration(**content["calibration"])
        else:
            print("calibrating", file=sys.stderr, flush=True)
            costs = shared_costs(options.device, num_workers, self.methods)
        content["calibration"] = {"machine": costs.machine, "lines": costs.lines}
        compute_s = {row["method"]: row["step_s"] for row in content["compute"]}
        for picked in self.methods:
            for row in content["race"]:
                if row["words"] == picked.words:
                    link = Link(options.link, options.latency, compute_s[picked.method.optimizer])
                    step_s = predicted_step_s(picked, row["params"], num_workers, link, costs)
                    row["predicted_step_s"] = step_s
                    steps = row["needed_steps"]
                    row["predicted_s"] = None if step_s is None or steps is None else step_s * steps


def save_examples(recorded: Recorded, data: str, path: Path) -> None:
    """Read the text once for all ranks; refused if it is not the record's."""
    config = recorded.config
    examples = Gpt.load(replace(config, data=data or config.data))
    if examples.fingerprint != recorded.text_sha256:
        raise ArgumentError(
            f"data must be the text of the record, whose hash is {recorded.text_sha256}, got "
            f"{examples.fingerprint} (without data it is torch's sources, which differ by version)"
        )
    torch.save(tuple(examples), path)


def check_link(links: Links, bandwidth: float | None, results: Results) -> None:
    """Known transfers on the links before anything is raced; a relay that cannot keep up is refused."""
    job = {"bandwidths_bits_per_s": [bandwidth], "latency_s": links.latency_s}
    for row in launch("benchmarks.slow_network.link_check", job, links):
        results.add("link", row)
        print(link_words(row), file=sys.stderr, flush=True)
        if row.get("relay_busy", 0.0) > MOST_BUSY:
            raise NetworkError(
                f"the relay must take at most {MOST_BUSY:.0%} of a core, or it is slower than the links, got "
                f"{row['relay_busy']:.0%}"
            )
