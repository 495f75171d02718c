"""Time to accuracy: the target and the learning rates on the unshaped link, then the race on the real one."""

import argparse
import sys
from typing import Any

from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.links import Links
from benchmarks.slow_network.methods import Method
from benchmarks.slow_network.results import Results, Row, describe
from benchmarks.slow_network.search import best_lr, reached_accuracy, rows_of, target_of
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data.images import load_images


class Race:
    """The runs of one comparison; those whose rows are recorded are not run again.

    Args:
        options: of the command line.
        results: where rows go.
    """

    def __init__(self, options: argparse.Namespace, results: Results) -> None:
        self.options, self.results = options, results
        if options.steps % options.evaluate_every:
            numbers = f"{options.steps} and {options.evaluate_every}"
            raise ArgumentError(f"steps must be a multiple of evaluate-every, got {numbers}")
        load_images("fashion-mnist", options.data, "cpu")  # refuses a path that does not hold it
        self.methods = [text for text in options.methods if text != "dense"]

    def try_dense(self, links: Links) -> None:
        """Dense with every learning rate to its last step."""
        runs = [{"method": "dense", "lr": lr} for lr in self.options.lrs]
        self._run(links, runs, None, None)

    def try_methods(self, links: Links) -> None:
        """Every other method with every learning rate, until it reaches the target."""
        runs = [{"method": text, "lr": lr} for text in self.methods for lr in self.options.lrs]
        self._run(links, runs, None, self.target)

    def run_on_link(self, links: Links) -> None:
        """Every method that can reach the target, with its best learning rate, on the shaped link."""
        runs = []
        for text in self.options.methods:
            lr = best_lr(self._rows(text, bandwidth_bits_per_s=None), self.target)
            if lr is None:
                print(f"{text} did not reach {self.target:.2f} % with any learning rate", file=sys.stderr)
            else:
                runs.append({"method": text, "lr": lr})
        self._run(links, runs, self.options.link, self.target)

    @property
    def target(self) -> float:
        """What all must reach."""
        return target_of(self._rows("dense", bandwidth_bits_per_s=None, target=None))

    def _rows(self, text: str, **settings: Any) -> list[Row]:
        rows = self.results.content["time_to_accuracy"]
        return rows_of(Method.parse(text), rows, workers=self.options.workers, **settings)

    def _run(self, links: Links, runs: list[Row], link: float | None, target: float | None) -> None:
        same = {"bandwidth_bits_per_s": link, "target": target}
        missing = [run for run in runs if not self._rows(run["method"], lr=run["lr"], **same)]
        if not missing:
            return
        job = {
            "runs": missing,
            "bandwidth_bits_per_s": link,
            "target": target,
            "num_steps": self.options.steps,
            "batch_size": self.options.batch_size,
            "evaluate_every": self.options.evaluate_every,
            "data": self.options.data and str(self.options.data),
        }
        for row in launch("benchmarks.slow_network.accuracy", job, links):
            self.results.add("time_to_accuracy", row)
            words = f"{describe(row)}, lr {row['lr']:g}: {reached_accuracy(row['curve']):.2f} % after"
            print(f"{words} {row['steps']} steps, {row['curve'][-1][0]:.1f} s", file=sys.stderr, flush=True)
