"""How long does training take to an accuracy with each method? One rank's side; run by `launch`.

A CNN on Fashion-MNIST with plain SGD, whose learning rate falls linearly to zero, alike for all. The clock
runs while steps are taken and stands still during evaluations, which the ranks share. What a first step
compiles is compiled before, on a model thrown away.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.slow_network.methods import Method
from benchmarks.slow_network.rank import Rank, joined
from benchmarks.slow_network.search import reached_accuracy
from regtopk.lab.experiments.data.images import Images, load_images, standardised
from regtopk.lab.experiments.data.splits import batch_order, divide

SEED = 0
WARM_UP = 3


def main() -> None:
    with joined() as rank:
        path = rank.job["data"]
        images = standardised(load_images("fashion-mnist", path and Path(path), "cpu"))
        most_steps: dict[str, int] = {}
        for run in rank.job["runs"]:
            training = Training(rank, images, run)
            rank.ask_for_links(None)
            training.warm_up()
            rank.ask_for_links(rank.job["bandwidth_bits_per_s"])
            row = training.run(most_steps.get(run["method"], rank.job["num_steps"]))
            rank.record(row)
            if row["reached_s"] is not None:  # of its other learning rates only sooner is of interest
                most_steps[run["method"]] = row["steps"]


def make_network() -> nn.Module:
    """Two convolutions and two linear layers, J = 2,430,410, nearly all of them in the first linear one."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1568, 1536),
        nn.ReLU(),
        nn.Linear(1536, 10),
    )


class Training:
    """One run: a method and a learning rate.

    Args:
        rank: this one.
        images: all of them, on every rank.
        run: {"method": ..., "lr": ...}.
    """

    def __init__(self, rank: Rank, images: Images, run: dict[str, Any]) -> None:
        self.rank, self.images = rank, images
        self.method, self.lr = Method.parse(run["method"]), run["lr"]
        job = rank.job
        parts = divide(images.train_labels, rank.num_workers, "iid", SEED)
        self.order = batch_order(parts, job["batch_size"], job["num_steps"], SEED)[:, rank.index]
        torch.manual_seed(SEED)
        self.start = make_network().state_dict()

    def warm_up(self) -> None:
        """The first steps, on a model that is thrown away."""
        step, _ = self.begin()
        for number in range(WARM_UP):
            step(number)

    def begin(self) -> tuple[Callable[[int], None], nn.Module]:
        """A step by its number, and the network that it trains."""
        network = make_network()
        network.load_state_dict(self.start)
        model, _ = self.method.wrap(network)
        optimizer = torch.optim.SGD(network.parameters(), lr=self.lr)

        def step(number: int) -> None:
            rows = self.order[number]
            optimizer.param_groups[0]["lr"] = self.lr * (1 - number / len(self.order))
            optimizer.zero_grad()
            scores = model(self.images.train[rows])
            F.cross_entropy(scores, self.images.train_labels[rows]).backward()
            optimizer.step()

        return step, network

    def run(self, most_steps: int) -> dict[str, Any]:
        """Train until the target is reached, if there is one, or for so many steps."""
        job, step, network = self.rank.job, *self.begin()
        target, every = job["target"], job["evaluate_every"]
        clock_s, curve, has_reached = 0.0, [], False
        for first in range(0, most_steps, every):
            self.rank.gathered()
            start = time.perf_counter()
            for number in range(first, first + every):
                step(number)
            clock_s += self.rank.slowest(time.perf_counter() - start)
            curve.append([clock_s, self.accuracy(network)])
            has_reached = target is not None and reached_accuracy(curve) >= target
            if has_reached:
                break
        return {
            "workers": self.rank.num_workers,
            "bandwidth_bits_per_s": job["bandwidth_bits_per_s"],
            "latency_s": 0.0,
            "params": sum(p.numel() for p in network.parameters()),
            "method": self.method.name,
            "density": self.method.density,
            "value_code": self.method.value_code,
            "collective": self.method.collective,
            "lr": self.lr,
            "target": target,
            "reached_s": clock_s if has_reached else None,
            "steps": every * len(curve),
            "curve": curve,
        }

    @torch.no_grad()
    def accuracy(self, network: nn.Module) -> float:
        """Percent of the test images; every rank looks at its share."""
        rank, count = self.rank.index, self.rank.num_workers
        images, labels = self.images.test[rank::count], self.images.test_labels[rank::count]
        num_right = int((network(images).argmax(-1) == labels).sum())
        return 100 * self.rank.total(num_right) / len(self.images.test_labels)
