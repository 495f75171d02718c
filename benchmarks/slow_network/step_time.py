"""How long does a step take with each method, on each link? One rank's side; run by `launch`.

One method after another, as in training, where a model has the caches to itself: its model is warmed up on
the unshaped link, then the links change under it. A step is forward, backward with DDP, and SGD; its time is
that of the slowest rank.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.slow_network.methods import Method, SentBytes
from benchmarks.slow_network.models import MODELS, Shapes
from benchmarks.slow_network.rank import Rank, joined, processors_busy_s

BATCH = 4
LR = 1e-4
WARM_UP = 4  # DDP makes its buckets anew, PowerSGD begins after 2
SETTLE_S = 0.02  # for the last acknowledgements to be counted
DISTURBED = 0.1  # of all processors' time, taken by other processes
PATIENCE = 4  # times the time of a method on a link, if others disturb it


class Measured(NamedTuple):
    """A step: its time, bytes that left and reached the interface, and processor time that others took."""

    step_s: float
    sent_bytes: float
    received_bytes: float
    by_others: float


def main() -> None:
    with joined() as rank:
        compute_s = measure_compute(rank)
        for text in rank.job["methods"]:
            measure_method(rank, Method.parse(text), compute_s)
            gc.collect()  # a model in DDP holds on to itself


def measure_compute(rank: Rank) -> float:
    """A step without an exchange: all ranks at the same time, each by itself."""
    stepper = Stepper(rank)
    for _ in range(WARM_UP):
        timed(rank, stepper.step)
    return statistics.median(step.step_s for step in measure_steps(rank, stepper))


class Stepper:
    """A model, and a step of it; plain without a method."""

    def __init__(self, rank: Rank, method: Method | None = None) -> None:
        torch.manual_seed(0)
        self.shapes = Shapes(MODELS[rank.job["model"]]())
        self.model: nn.Module = self.shapes
        self.sent_bytes: SentBytes = lambda: (0, 0)
        if method is not None:
            self.model, self.sent_bytes = method.wrap(self.shapes)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.generator = torch.Generator().manual_seed(1 + rank.index)

    def step(self) -> None:
        x = torch.randn(BATCH, self.shapes.width, generator=self.generator)
        self.optimizer.zero_grad()
        self.model(x).backward()
        self.optimizer.step()


def timed(rank: Rank, work: Callable[[], None]) -> Measured:
    """Work that all ranks begin together: its time on the slowest, and bytes at this rank's interface."""
    rank.gathered()
    sent, received = rank.interface_bytes()
    busy_s, own_s, start = processors_busy_s(), time.process_time(), time.perf_counter()
    work()
    step_s = rank.slowest(time.perf_counter() - start)
    busy_s, own_s = processors_busy_s() - busy_s, time.process_time() - own_s
    by_others = (rank.first(busy_s) - rank.total(own_s)) / step_s / (os.cpu_count() or 1)
    time.sleep(SETTLE_S)
    sent_after, received_after = rank.interface_bytes()
    return Measured(step_s, sent_after - sent, received_after - received, by_others)


def measure_method(rank: Rank, method: Method, compute_s: float) -> None:
    """Record the step of one method on every link."""
    stepper = Stepper(rank, method)
    for _ in range(WARM_UP):
        timed(rank, stepper.step)
    for bandwidth in rank.job["bandwidths_bits_per_s"]:
        rank.ask_for_links(bandwidth)
        idle = [timed(rank, lambda: None) for _ in range(5)]  # the bytes of measuring itself
        steps = measure_steps(rank, stepper)
        rank.record(as_record(rank, method, bandwidth, stepper, steps, idle, compute_s))
    rank.ask_for_links(None)


def measure_steps(rank: Rank, stepper: Stepper) -> list[Measured]:
    """As many steps as there is time for, without those that other processes disturbed.

    For these there is more time; if all steps were disturbed, the first count.
    """
    steps: list[Measured] = []
    job = rank.job
    while True:
        steps.append(timed(rank, stepper.step))
        quiet = [step for step in steps if step.by_others <= DISTURBED]
        spent_s = sum(step.step_s for step in steps)
        quiet_s = sum(step.step_s for step in quiet)
        is_enough = len(quiet) >= job["most_steps"] or quiet_s > job["seconds"]
        counted = quiet or steps[: max(job["least_steps"], job["most_steps"])]
        if (is_enough or spent_s > PATIENCE * job["seconds"]) and len(counted) >= job["least_steps"]:
            return counted


def as_record(
    rank: Rank,
    method: Method,
    bandwidth: float | None,
    stepper: Stepper,
    steps: list[Measured],
    idle: list[Measured],
    compute_s: float,
) -> dict[str, Any]:
    sent_bytes, received_bytes = stepper.sent_bytes()
    sent, received = (
        statistics.median(step[i] for step in steps) - statistics.median(nothing[i] for nothing in idle)
        for i in (1, 2)
    )
    return {
        "workers": rank.num_workers,
        "bandwidth_bits_per_s": bandwidth,
        "latency_s": rank.job["latency_s"],
        "params": sum(p.numel() for p in stepper.model.parameters()),
        "method": method.name,
        "density": method.density,
        "value_code": method.value_code,
        "collective": method.collective,
        "step_s": statistics.median(step.step_s for step in steps),
        "step_s_all": [step.step_s for step in steps],
        "compute_s": compute_s,
        "sent_bytes": sent_bytes,
        "received_bytes": received_bytes,
        "interface_sent_bytes": sent,
        "interface_received_bytes": received,
    }
