"""How long does a GPT take to a test loss with each method? One rank's side; run by `launch`.

AdamW with a learning rate that rises, then falls linearly to zero, alike for all. The clock runs while steps
are taken and stands still during evaluations, which the ranks share. What a first step compiles is compiled
before, on a network thrown away.
"""

import gc
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.slow_network.gpt_methods import every_of, join
from benchmarks.slow_network.gpt_plan import Plan
from benchmarks.slow_network.library import library_sources
from benchmarks.slow_network.rank import Rank, joined
from regtopk.lab.experiments.data.examples import Examples, of_text
from regtopk.lab.experiments.data.splits import batch_order, divide
from regtopk.lab.experiments.data.text import load_text
from regtopk.lab.experiments.networks.gpt import GPT

HEAD = 64  # width of an attention head
BETAS, WEIGHT_DECAY, LARGEST_NORM = (0.9, 0.95), 0.1, 1.0
LEAST_WARM_UP = 3  # DDP makes its buckets anew, PowerSGD begins after 2 steps
LEAST_DENSE_STEPS = 2  # that torch's PowerSGD allows
Run = dict[str, Any]


def main() -> None:
    with joined() as rank:
        plan = Plan(**rank.job["plan"])
        path = rank.job["data"]
        text = load_text(path and Path(path), sources=library_sources, window=plan.context + 1)
        examples = of_text(text, "cpu", plan.context + 1)
        for run in rank.job["runs"]:
            row = (
                trained(rank, plan, examples, run) if "num_steps" in run else timed(rank, plan, examples, run)
            )
            rank.record({**row, "text_sha256": text.sha256})
            gc.collect()  # a model in DDP holds on to itself


def trained(rank: Rank, plan: Plan, examples: Examples, run: Run) -> dict[str, Any]:
    """A run of `num_steps`, or until it reaches its `target`, if it has one."""
    warmed_up(rank, plan, examples, run)
    gc.collect()
    training = Training(rank, plan, examples, run, run["num_steps"], plan.warm_up)
    rank.ask_for_links(run["bandwidth_bits_per_s"])
    target, curve, reached_s = run["target"], [], None
    while training.num_steps < run["num_steps"] and reached_s is None:
        training.take_timed(run["stretch"])
        curve.append([sum(training.stretch_s), training.test_loss()])
        if target is not None and curve[-1][1] <= target:
            reached_s = curve[-1][0]
    return {**training.row(), "reached_s": reached_s, "steps": training.num_steps, "curve": curve}


def timed(rank: Rank, plan: Plan, examples: Examples, run: Run) -> dict[str, Any]:
    """The time of a step, from stretches until `seconds` are over: at least 2, at most `most_stretches`."""
    training = warmed_up(rank, plan, examples, run)
    rank.ask_for_links(run["bandwidth_bits_per_s"])
    times = training.stretch_s
    while len(times) < 2 or (len(times) < run["most_stretches"] and sum(times) < run["seconds"]):
        training.take_timed(run["stretch"])
    return training.row()


def warmed_up(rank: Rank, plan: Plan, examples: Examples, run: Run) -> "Training":
    """A training after its first steps, on links that are not shaped."""
    rank.ask_for_links(None)
    first = max(LEAST_WARM_UP, every_of(run["method"]))
    most_steps = first + run["stretch"] * run.get("most_stretches", 0)
    training = Training(rank, plan, examples, run, most_steps, LEAST_DENSE_STEPS)
    training.take(first)
    return training


class Training:
    """A network, what trains it, and the batches of this rank.

    Args:
        rank: this one.
        plan: sizes.
        examples: windows of the text, all of them on every rank.
        run: method, lr, seed, batch_size, stretch and bandwidth_bits_per_s.
        most_steps: after which the learning rate is zero.
        powersgd_dense_steps: of that method.
    """

    def __init__(
        self,
        rank: Rank,
        plan: Plan,
        examples: Examples,
        run: Run,
        most_steps: int,
        powersgd_dense_steps: int,
    ) -> None:
        self.rank, self.plan, self.examples, self.run = rank, plan, examples, run
        seed, heads = run["seed"], max(1, plan.width // HEAD)
        parts = divide(examples.labels, rank.num_workers, "iid", seed)
        self.order = batch_order(parts, run["batch_size"], most_steps, seed)[:, rank.index]
        torch.manual_seed(seed)
        self.network = GPT(examples.num_classes, plan.context, plan.width, plan.num_layers, heads)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=run["lr"], betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.joined = join(run["method"], self.network, self.optimizer, powersgd_dense_steps)
        self.num_steps = 0
        self.stretch_s: list[float] = []  # times of stretches, of the slowest rank

    def take(self, num_steps: int) -> None:
        """So many steps."""
        for rows in self.order[self.num_steps : self.num_steps + num_steps]:
            factor = min((self.num_steps + 1) / self.plan.warm_up, 1 - self.num_steps / len(self.order))
            self.optimizer.param_groups[0]["lr"] = self.run["lr"] * factor
            self.num_steps += 1
            self.optimizer.zero_grad()
            loss_of(
                self.joined.model, self.examples.train[rows], self.examples.train_targets[rows]
            ).backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), LARGEST_NORM)
            self.optimizer.step()

    def take_timed(self, num_steps: int) -> None:
        """So many steps that all ranks begin together."""
        dist.barrier()
        start = time.perf_counter()
        with self.rank.watching_the_link():
            self.take(num_steps)
        self.stretch_s.append(self.rank.slowest(time.perf_counter() - start))

    def row(self) -> dict[str, Any]:
        """What was run, and the time and the bytes of a step."""
        run = self.run
        return {
            "workers": self.rank.num_workers,
            "bandwidth_bits_per_s": run["bandwidth_bits_per_s"],
            "latency_s": self.rank.job["latency_s"],
            "params": sum(p.numel() for p in self.network.parameters()),
            **{name: run.get(name) for name in ("method", "lr", "seed", "target", "batch_size", "stretch")},
            "step_s": statistics.median(self.stretch_s) / run["stretch"],
            "stretch_s": self.stretch_s,
            "sent_bytes": self.joined.sent_bytes(),
            "busiest_bytes": self.rank.busiest_bytes,
        }

    @torch.no_grad()
    def test_loss(self) -> float:
        """Nats per character; every rank looks at its share of the test's windows."""
        rank, tests = self.rank, self.plan.num_tested
        stride = len(self.examples.test) // tests
        own = torch.arange(rank.index, tests, rank.num_workers) * stride
        exchange = self.joined.exchange
        with nullcontext() if exchange is None else exchange.agreed():
            loss = loss_of(self.network, self.examples.test[own], self.examples.test_targets[own])
        return rank.total(float(loss) * len(own)) / tests


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
