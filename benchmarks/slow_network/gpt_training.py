"""Trains a GPT with each method on shaped links. One rank's side; run by `launch`.

The training is that of `regtopk train` and `regtopk compare gpt`: the same network, batches and optimizers.
The clock runs while steps are taken and stands still during evaluations, which are rank 0's. What a first
step compiles is compiled before, in a training that is thrown away, on links that are not shaped.
"""

import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.slow_network.gpt_picked import config_of
from benchmarks.slow_network.link_check import relay_use
from benchmarks.slow_network.rank import Rank, joined
from benchmarks.steps_to_target import crossing
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.experiments.ranks.config import TrainConfig
from regtopk.lab.experiments.ranks.tasks import RankTask
from regtopk.lab.experiments.ranks.train import RankTraining
from regtopk.lab.experiments.tasks.deep import Gpt
from regtopk.lab.experiments.tasks.task import DTYPES
from regtopk.lab.method import Method

Run = dict[str, Any]


def main() -> None:
    with joined() as rank:
        device = torch.device(rank.job["device"])
        config = config_of(rank.job["config"])
        saved = torch.load(rank.job["examples"], mmap=True, weights_only=True)
        placed: list[Any] = [x.to(device) if isinstance(x, Tensor) else x for x in saved]
        examples = Examples(*placed)
        for run in rank.job["runs"]:
            rank.ask_for_links(None)
            warm_up = Training(rank, config, examples, run)
            warm_up.take(run["warm_up"])
            del warm_up
            gc.collect()  # a model in DDP holds on to itself
            training = Training(rank, config, examples, run)
            rank.ask_for_links(run["bandwidth_bits_per_s"])
            found = raced(training) if "stops" in run else timed(training)
            rank.record({**training.row(), **found})
            del training
            gc.collect()


@dataclass(frozen=True)
class PreciseTask(RankTask):
    """A task whose matrix products are in a precision, as the simulator's are."""

    dtype: torch.dtype = torch.float32

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Cross entropy of a step's examples."""
        is_low = self.dtype != torch.float32
        with torch.autocast(self.train.device.type, self.dtype, enabled=is_low):
            return super().loss(model, step)


class Training:
    """A network, what trains it, and the batches of this rank.

    Args:
        rank: this one.
        config: of the recorded comparison.
        examples: windows of the text, on the rank's device.
        run: a method in words, a seed, and how far.
    """

    def __init__(self, rank: Rank, config: CompareConfig, examples: Examples, run: Run) -> None:
        self.rank, self.run = rank, run
        self.method = config.complete(Method.parse(run["words"]))
        self.every = self.method.rounds.every
        self.clock_s = 0.0
        self.sent_bytes = self.received_bytes = 0.0  # at this rank's interface while the clock ran
        device, seed = examples.train.device, run["seed"]
        gpt = Gpt(config, [seed], examples)
        network = Gpt.make_network(config, examples, seed).to(device)
        self.numel = sum(p.numel() for p in network.parameters())
        task = PreciseTask(
            network,
            gpt.order[:, 0, rank.index].to(device),
            examples.train,
            examples.train_targets,
            lambda network: gpt.evaluate(flatten(network).unsqueeze(0))[0],
            dtype=DTYPES[config.precision],
        )
        own = {name: getattr(config, name) for name in ("num_workers", "num_steps", "value_code")}
        is_plain = self.method.algorithm == "dense" and not self.method.rounds.has_updates
        settings = TrainConfig(task="gpt", algorithms="topk", **own)
        self._training = RankTraining(task, settings, self.method, is_plain)
        if is_plain:
            assert isinstance(self._training.model, DistributedDataParallel)
            self._training.model.register_comm_hook(None, in_bfloat16)

    @property
    def num_steps(self) -> int:
        """Taken so far."""
        return self._training.num_steps

    def take(self, num_steps: int) -> None:
        """So many steps."""
        for _ in range(num_steps):
            self._training.step()

    def take_timed(self, num_steps: int) -> float:
        """So many steps that all ranks begin together; the seconds of the slowest."""
        self.rank.gathered()
        before = self.rank.interface_bytes()
        start = time.perf_counter()
        with self.rank.watching_the_link() if self.run.get("is_watched") else nullcontext():
            self.take(num_steps)
        seconds = self.rank.slowest(time.perf_counter() - start)
        sent, received = (now - then for now, then in zip(self.rank.interface_bytes(), before, strict=True))
        self.sent_bytes, self.received_bytes = self.sent_bytes + sent, self.received_bytes + received
        self.clock_s += seconds
        return seconds

    def test_loss(self) -> float:
        """Nats per token, as rank 0 finds it."""
        loss = self._training.evaluate()["test_loss"] if self.rank.index == 0 else 0.0
        return self.rank.first(loss)

    def row(self) -> dict[str, Any]:
        """What was run, and what a step took: seconds, and bytes through a rank's interface."""
        rank, run, num_steps = self.rank, self.run, self.num_steps
        return {
            "workers": rank.num_workers,
            "latency_s": rank.job["latency_s"],
            "params": self.numel,
            **{name: run.get(name) for name in ("method", "words", "seed", "target", "bandwidth_bits_per_s")},
            "lr": self.method.lr,
            "batch_size": rank.job["config"]["batch_size"],
            "step_s": self.clock_s / num_steps,
            "sent_bytes_per_step": rank.total(self.sent_bytes) / rank.num_workers / num_steps,
            "received_bytes_per_step": rank.total(self.received_bytes) / rank.num_workers / num_steps,
        }


def in_bfloat16(group: Any, bucket: GradBucket) -> Future[Tensor]:
    """torch's hook, by a name that DDP does not refuse without NCCL: gloo adds bfloat16 too."""
    return default_hooks.bf16_compress_hook(group, bucket)


def timed(training: Training) -> dict[str, Any]:
    """The time of a step, from stretches of steps: the median counts."""
    run = training.run
    times = [training.take_timed(run["stretch"]) for _ in range(run["num_stretches"])]
    found = {"stretch": run["stretch"], "stretch_s": times, "busiest_bytes": training.rank.busiest_bytes}
    return {"step_s": statistics.median(times) / run["stretch"], **found}


def raced(training: Training) -> dict[str, Any]:
    """Train until the target is reached, or to the last stop if there is no target.

    Where the steps that the record says are needed would take longer than `most_seconds`, a few are timed, in
    whole rounds, and the time of all is computed.
    """
    run, rank, target, needed = training.run, training.rank, training.run["target"], training.run["needed"]
    relay = rank.relay_state()
    curve = [(0, 0.0, training.test_loss())]
    is_too_slow = False
    whole_rounds = -(-run["timed_steps"] // training.every) * training.every
    while not is_too_slow and not has_reached(curve, target) and training.num_steps < run["stops"][-1]:
        stop = next(s for s in run["stops"] if s > training.num_steps)
        at = whole_rounds if training.num_steps < whole_rounds < stop else stop
        training.take_timed(at - training.num_steps)
        if at == stop:
            curve.append((stop, training.clock_s, training.test_loss()))
        if at >= whole_rounds and at % training.every == 0:
            step_s = training.clock_s / training.num_steps
            is_too_slow = needed is None or step_s * needed > run["most_seconds"]
    found: dict[str, Any] = {"curve": curve, "timed_steps": training.num_steps, "needed_steps": needed}
    if has_reached(curve, target):
        steps, seconds = (crossing([(point[i], point[2]) for point in curve], target) for i in (0, 1))
        found |= {"reached_steps": steps, "reached_s": seconds, "is_computed": False}
    elif is_too_slow and needed is not None:
        seconds = training.clock_s / training.num_steps * needed
        found |= {"reached_steps": needed, "reached_s": seconds, "is_computed": True}
    else:
        found |= {"reached_steps": None, "reached_s": None, "is_computed": False}
    return found | relay_use(relay, rank.relay_state(), training.clock_s)


def has_reached(curve: list[tuple[int, float, float]], target: float | None) -> bool:
    """Whether the last test loss is at or below the target."""
    return target is not None and curve[-1][2] <= target
