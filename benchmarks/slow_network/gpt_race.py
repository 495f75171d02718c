"""Time to a loss: learning rates on the unshaped link, then the race on the real one; what latency costs."""

import argparse
import json
import math
import sys
from dataclasses import asdict
from itertools import product
from typing import Any

from benchmarks.slow_network.gpt_methods import EVERY, WORDS
from benchmarks.slow_network.gpt_plan import FULL, QUICK
from benchmarks.slow_network.gpt_tables import summarise, tables
from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.library import library_sources
from benchmarks.slow_network.links import Links
from benchmarks.slow_network.results import Results, Row
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data.text import load_text

KINDS = ("search", "race", "steps", "latency")
UNSHAPED = ("dense", "fp16")  # half an hour on the link
LATENCY_METHOD = "updates:4"


class GptRace:
    """The runs of one comparison. Searches that are recorded are not run again; what is timed always is.

    Args:
        options: of the command line.
        command: that the results name.
    """

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options = options
        self.plan = QUICK if options.quick else FULL
        # refuses a file that is no text
        load_text(options.data, sources=library_sources, window=self.plan.context + 1)
        self.results = Results(options.out, command, KINDS)
        plan = json.loads(json.dumps(asdict(self.plan)))
        if self.results.content.setdefault("plan", plan) != plan:
            raise ArgumentError(f"out must hold results of the same plan, but {options.out} has another")

    def search(self, links: Links) -> None:
        """Every method with every learning rate on the unshaped link: shorter, on a seed of its own."""
        plan = self.plan
        training = {"num_steps": plan.search_steps, "stretch": plan.search_steps, "target": None}
        runs = [self._run(method, lr, plan.search_seed) | training for method in EVERY for lr in plan.lrs]
        recorded = [(row["method"], row["lr"]) for row in self._rows("search")]
        self._launch("search", [r for r in runs if (r["method"], r["lr"]) not in recorded], links)

    def race(self, links: Links) -> None:
        """Every method with its best learning rate and every seed, until it reaches the target.

        The first seed trains on the link, but for DDP's dense and fp16 gradients. All else trains on the
        unshaped link, where every bit is the same, unless all are to be raced for real.
        """
        plan = self.plan
        runs = []
        for seed, method in product(plan.claim_seeds, EVERY):
            is_on_link = self.options.real or (seed == plan.claim_seeds[0] and method not in UNSHAPED)
            run = self._run(method, self.best_lr(method), seed, plan.link if is_on_link else None)
            runs.append({**run, "num_steps": plan.num_steps, "target": plan.target})
        self.results.content["race"] = []
        self._launch("race", runs, links)

    def measure_steps(self, links: Links) -> None:
        """Some steps of every method on both links, in whole rounds."""
        plan = self.plan
        runs = []
        for bandwidth in (plan.link, plan.slow_link):
            for method, every in EVERY.items():
                run = self._run(method, self.best_lr(method), plan.claim_seeds[0], bandwidth)
                runs.append({**run, "stretch": every, "seconds": plan.seconds, "most_stretches": 8})
        self._launch("steps", runs, links)

    def measure_latency(self, links: Links) -> None:
        """Steps of one method, on links that have latency or not."""
        plan = self.plan
        run = self._run(LATENCY_METHOD, self.best_lr(LATENCY_METHOD), plan.claim_seeds[0], plan.link)
        stretch = 4 * EVERY[LATENCY_METHOD]
        run |= {"batch_size": plan.latency_batch_size, "stretch": stretch, "seconds": math.inf}
        self._launch("latency", [run | {"most_stretches": plan.latency_stretches}], links)

    def summary(self) -> str:
        """The tables; what they say is kept beside the rows."""
        content = self.results.content
        content["summary"] = summarise(content)
        self.results.write()
        return tables(content)

    def best_lr(self, method: str) -> float:
        """The learning rate with the lowest test loss at the end of the search.

        Raises:
            ArgumentError: there was no search.
        """
        found = [row for row in self._rows("search") if row["method"] == method]
        if not found:
            raise ArgumentError(f"learning rates must be searched first, there are none of {method}")
        lr: float = min(found, key=lambda row: row["curve"][-1][1])["lr"]
        return lr

    def _run(self, method: str, lr: float, seed: int, bandwidth: float | None = None) -> dict[str, Any]:
        plan = self.plan
        return {
            "method": method,
            "lr": lr,
            "seed": seed,
            "bandwidth_bits_per_s": bandwidth,
            "batch_size": plan.batch_size,
            "stretch": plan.stretch,
        }

    def _rows(self, kind: str) -> list[Row]:
        rows: list[Row] = self.results.content[kind]
        return [row for row in rows if row["workers"] == self.options.workers]

    def _launch(self, kind: str, runs: list[dict[str, Any]], links: Links) -> None:
        if not runs:
            return
        job = {
            "plan": asdict(self.plan),
            "runs": runs,
            "latency_s": links.latency_s,
            "data": self.options.data and str(self.options.data),
        }
        for row in launch("benchmarks.slow_network.gpt_training", job, links):
            self.results.add(kind, row)
            said = f"{kind}: {WORDS[row['method']]}, lr {row['lr']:g}: {row['step_s']:.3f} s a step"
            if "curve" in row:
                said += f", test loss {row['curve'][-1][1]:.3f} after {row['steps']} steps"
            print(said, file=sys.stderr, flush=True)
