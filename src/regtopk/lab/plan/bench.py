"""How work is timed: by elapsed time, or by the processor time it takes where workers share processors."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from regtopk.core.timer import Timer

_NUM_REPEATS, _ENOUGH_S = 7, 0.3


@dataclass(frozen=True)
class Bench:
    """Times work on a device.

    Workers that share a machine wait for one another, so the elapsed time of a few repetitions says little
    about the many steps of a training. Processor time does not depend on who waits when. Where all workers
    always have work, a step lasts as long as the work of all of them together.
    """

    device: torch.device
    now: Callable[[], float] = time.perf_counter  # the clock, in seconds

    @classmethod
    def of(cls, device: str, num_workers: int, num_threads: int, num_cores: int) -> "Bench":
        """For one of several workers on a machine, by processor time; by elapsed time if it is alone."""
        if num_workers == 1:
            return cls(torch.device(device))
        elapsed_per_cpu_second = max(1 / num_threads, num_workers / num_cores)
        return cls(torch.device(device), lambda: elapsed_per_cpu_second * time.process_time())

    def seconds(self, function: Callable[[], Any]) -> float:
        """How long a function takes once."""
        timer = Timer(self.device, self.now)
        with timer.phase("work"):
            function()
        return timer.seconds()["work"]

    def typical(self, function: Callable[[], Any]) -> float:
        """How long a function takes as a rule."""
        return typical(lambda: {"work": self.seconds(function)})["work"]


def typical(run: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The median of each phase's seconds in a few runs, after one to warm up; in fewer if that is long."""
    run()
    times: list[dict[str, float]] = []
    spent_s = 0.0
    while len(times) < _NUM_REPEATS and (len(times) < 2 or spent_s < _ENOUGH_S):
        times.append(run())
        spent_s += sum(times[-1].values())
    return {phase: median(seconds[phase] for seconds in times) for phase in times[0]}
