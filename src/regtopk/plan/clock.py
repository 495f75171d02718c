"""How work is timed: by the clock on the wall, or by what it takes from processors that workers share."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

_NUM_REPEATS, _ENOUGH_S = 7, 0.3


@dataclass(frozen=True)
class Clock:
    """A clock for repeated work on a device.

    Workers that share a machine wait for one another, some often and some seldom: a few repetitions by the
    wall say little about the many steps of a training. What each takes from the processors does not depend
    on who waits when, and where all of them always have work, a step lasts as long as all of it together.

    Args:
        device: where the work is done.
        stretch: None for the wall; else elapsed seconds for each second of processor time of this process.
    """

    device: torch.device
    stretch: float | None = None

    @classmethod
    def of(cls, device: str, num_workers: int, num_threads: int, num_cores: int) -> "Clock":
        """The clock of one of some workers with some threads each: the wall's if the worker is alone."""
        if num_workers == 1:
            return cls(torch.device(device))
        return cls(torch.device(device), max(1 / num_threads, num_workers / num_cores))

    def now(self) -> float:
        """Seconds since some time or other."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() if self.stretch is None else self.stretch * time.process_time()

    def time(self, function: Callable[[], Any]) -> float:
        """How long a function takes, typically."""

        def run() -> float:
            start = self.now()
            function()
            return self.now() - start

        return typical(run)


def typical(run: Callable[[], float]) -> float:
    """The median of what a few runs return, after one to warm up; of fewer if that is long."""
    run()
    times: list[float] = []
    while len(times) < _NUM_REPEATS and (len(times) < 2 or math.fsum(times) < _ENOUGH_S):
        times.append(run())
    return median(times)
