"""How long does a GPT take to a test loss with each method? One rank's side; run by torchrun.

AdamW with a learning rate that rises and then stays, so that nothing depends on when a run ends. The clock
runs while steps are taken and stands still during evaluations, which the ranks share. What a first step
compiles is compiled before, on a network thrown away.
"""

import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.slow_network.gpt_methods import EVERY, join
from benchmarks.slow_network.gpt_plan import Plan
from benchmarks.slow_network.rank import Rank, joined
from regtopk.experiments.deep.examples import Examples, of_text
from regtopk.experiments.deep.networks.gpt import GPT
from regtopk.experiments.deep.text import load_text
from regtopk.experiments.splits import batch_order, divide

HEAD = 64  # width of an attention head
BETAS, WEIGHT_DECAY, LARGEST_NORM = (0.9, 0.95), 0.1, 1.0
LEAST_WARM_UP = 3  # DDP makes its buckets anew, PowerSGD begins after 2 steps
LEAST_DENSE_STEPS = 2  # that torch's PowerSGD allows


def main() -> None:
    with joined() as rank:
        plan = Plan(**rank.job["plan"])
        path = rank.job["data"]
        text = load_text(path and Path(path), window=plan.context + 1)
        examples = of_text(text, "cpu", plan.context + 1)
        most_steps: dict[str, int] = {}
        for run in rank.job["runs"]:
            row = run_once(rank, plan, examples, run, most_steps.get(run["method"], run["most_steps"]))
            rank.record({**row, "text_sha256": text.sha256})
            if row.get("reached_s") is not None:  # of its other learning rates only sooner is of interest
                most_steps[run["method"]] = row["steps"]


def run_once(
    rank: Rank, plan: Plan, examples: Examples, run: dict[str, Any], most_steps: int
) -> dict[str, Any]:
    """A run, after the first steps of one that is thrown away; its row.

    Args:
        rank: this one.
        plan: sizes.
        examples: windows of the text, all of them on every rank.
        run: method, lr, seed, target, bandwidth_bits_per_s, batch_size, stretch and most_steps. Without a
            target only the time of a step is measured.
        most_steps: of this run.
    """
    rank.ask_for_links(None)
    warm_up = max(LEAST_WARM_UP, EVERY[run["method"]])
    thrown_away = Training(rank, plan, examples, run, LEAST_DENSE_STEPS)
    thrown_away.take(warm_up)
    if run["target"] is None:  # these first steps serve as well
        rank.ask_for_links(run["bandwidth_bits_per_s"])
        row = thrown_away.measure(most_steps)
    else:
        del thrown_away
        gc.collect()  # a model in DDP holds on to itself
        training = Training(rank, plan, examples, run, plan.warm_up)
        rank.ask_for_links(run["bandwidth_bits_per_s"])
        row = training.train(most_steps)
    gc.collect()
    return row


class Training:
    """A network, what trains it, and the batches of this rank; `powersgd_dense_steps` is of that method."""

    def __init__(
        self, rank: Rank, plan: Plan, examples: Examples, run: dict[str, Any], powersgd_dense_steps: int
    ) -> None:
        self.rank, self.plan, self.examples, self.run = rank, plan, examples, run
        seed, heads = run["seed"], max(1, plan.width // HEAD)
        parts = divide(examples.labels, rank.num_workers, "iid", seed)
        num_steps = run["most_steps"] + max(EVERY.values())  # those before a measurement too
        self.order = batch_order(parts, run["batch_size"], num_steps, seed)[:, rank.index]
        torch.manual_seed(seed)
        self.network = GPT(examples.num_classes, plan.context, plan.width, plan.num_layers, heads)
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), lr=run["lr"], betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        joined_by = join(run["method"], self.network, self.optimizer, powersgd_dense_steps)
        self.model, self.sent_bytes = joined_by
        self.num_steps = 0
        self.stretch_s: list[float] = []  # times of stretches, of the slowest rank

    def take(self, num_steps: int) -> None:
        """So many steps."""
        for rows in self.order[self.num_steps : self.num_steps + num_steps]:
            self.num_steps += 1
            factor = min(1.0, self.num_steps / self.plan.warm_up)
            self.optimizer.param_groups[0]["lr"] = self.run["lr"] * factor
            self.optimizer.zero_grad()
            loss_of(self.model, self.examples.train[rows], self.examples.train_targets[rows]).backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), LARGEST_NORM)
            self.optimizer.step()

    def take_timed(self, num_steps: int) -> None:
        """So many steps that all ranks begin together."""
        dist.barrier()
        start = time.perf_counter()
        self.take(num_steps)
        self.stretch_s.append(self.rank.slowest(time.perf_counter() - start))

    def train(self, most_steps: int) -> dict[str, Any]:
        """Until the target is reached, or for so many steps."""
        target, curve = self.run["target"], []
        while self.num_steps < most_steps:
            self.take_timed(self.run["stretch"])
            curve.append([sum(self.stretch_s), self.test_loss()])
            if curve[-1][1] <= target:
                break
        reached_s = curve[-1][0] if curve[-1][1] <= target else None
        return {**self.row(), "reached_s": reached_s, "steps": self.num_steps, "curve": curve}

    def measure(self, num_steps: int) -> dict[str, Any]:
        """The time of a step."""
        for _ in range(num_steps // self.run["stretch"]):
            self.take_timed(self.run["stretch"])
        return self.row()

    def row(self) -> dict[str, Any]:
        """What was run, and the time and the bytes of a step."""
        run = self.run
        return {
            "workers": self.rank.num_workers,
            "bandwidth_bits_per_s": run["bandwidth_bits_per_s"],
            "latency_s": self.rank.job["latency_s"],
            "params": sum(p.numel() for p in self.network.parameters()),
            **{name: run[name] for name in ("method", "lr", "seed", "target", "batch_size", "stretch")},
            "step_s": statistics.median(self.stretch_s) / run["stretch"],
            "stretch_s": self.stretch_s,
            "sent_bytes": self.sent_bytes(),
        }

    @torch.no_grad()
    def test_loss(self) -> float:
        """Nats per character; every rank looks at its share of the test's windows."""
        rank, tests = self.rank, self.plan.num_tested
        stride = len(self.examples.test) // tests
        own = torch.arange(rank.index, tests, rank.num_workers) * stride
        loss = loss_of(self.network, self.examples.test[own], self.examples.test_targets[own])
        return rank.total(float(loss) * len(own)) / tests


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    main()
