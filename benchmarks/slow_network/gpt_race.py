"""Time to a loss: learning rates on the unshaped link, then the race on the real one, and what latency costs."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.slow_network.gpt_methods import EVERY, WORDS
from benchmarks.slow_network.gpt_plan import FULL, QUICK
from benchmarks.slow_network.gpt_tables import summarise, tables
from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.links import Links
from benchmarks.slow_network.results import Results, Row
from regtopk.errors import ArgumentError
from regtopk.experiments.deep.text import load_text

KINDS = ("search", "race", "steps")
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
        load_text(options.data, window=self.plan.context + 1)  # refuses a file that is no text
        self.results = Results(options.out, command, KINDS)
        plan = json.loads(json.dumps(asdict(self.plan)))
        if self.results.content.setdefault("plan", plan) != plan:
            raise ArgumentError(f"out must hold results of the same plan, but {options.out} has another")

    def search(self, links: Links) -> None:
        """Every method with every learning rate on the unshaped link, until it reaches the target."""
        plan = self.plan
        runs = [
            self._run(method, lr, plan.search_seed, None, plan.target) for method in EVERY for lr in plan.lrs
        ]
        recorded = [(row["method"], row["lr"]) for row in self._rows("search")]
        self._launch("search", [r for r in runs if (r["method"], r["lr"]) not in recorded], links)

    def race(self, links: Links) -> None:
        """Every method with its best learning rate on the link, with another seed."""
        plan = self.plan
        runs = [
            self._run(method, self.best_lr(method), plan.claim_seed, plan.link, plan.target)
            for method in EVERY
        ]
        self._launch("race", runs, links)

    def measure_slow_steps(self, links: Links) -> None:
        """Some steps of every method on the slow link: as many as that time allows, in whole rounds."""
        plan = self.plan
        step_s = {row["method"]: row["step_s"] for row in self._rows("race")}
        runs = []
        for method, every in EVERY.items():
            expected_s = every * step_s[method] * plan.link / plan.slow_link  # at most
            num_rounds = min(8, max(2, round(plan.slow_seconds / expected_s)))
            run = self._run(method, self.best_lr(method), plan.claim_seed, plan.slow_link, None)
            runs.append({**run, "stretch": every, "most_steps": num_rounds * every})
        self._launch("steps", runs, links)

    def measure_latency(self, links: Links) -> None:
        """Steps of one method, on links that have latency or not."""
        plan = self.plan
        run = self._run(LATENCY_METHOD, self.best_lr(LATENCY_METHOD), plan.claim_seed, plan.link, None)
        most_steps = plan.latency_stretches * plan.stretch
        run |= {"batch_size": plan.latency_batch_size, "most_steps": most_steps}
        self._launch("steps", [run], links)

    def summary(self) -> str:
        """The tables; what they say is kept beside the rows."""
        content = self.results.content
        content["summary"] = summarise(content)
        self.results.write()
        return tables(content)

    def best_lr(self, method: str) -> float:
        """The learning rate that reached the target in the fewest steps; the lowest loss breaks a tie.

        Raises:
            ArgumentError: none did.
        """
        reached = [r for r in self._rows("search") if r["method"] == method and r["reached_s"] is not None]
        if not reached:
            raise ArgumentError(
                f"every method must reach the test loss {self.plan.target} within {self.plan.most_steps} "
                f"steps in the search, {method} did with no learning rate"
            )
        lr: float = min(reached, key=lambda row: (row["steps"], row["curve"][-1][1]))["lr"]
        return lr

    def _run(
        self, method: str, lr: float, seed: int, bandwidth: float | None, target: float | None
    ) -> dict[str, Any]:
        plan = self.plan
        return {
            "method": method,
            "lr": lr,
            "seed": seed,
            "bandwidth_bits_per_s": bandwidth,
            "target": target,
            "batch_size": plan.batch_size,
            "stretch": plan.stretch,
            "most_steps": plan.most_steps,
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
