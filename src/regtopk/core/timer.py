"""Time spent in named phases, without making a GPU wait."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch


class Timer:
    """Adds up the seconds of named phases; time in a phase inside another counts for the inner one alone.

    On CUDA the clock is the device's: events are recorded on the stream that is current when the timer is
    made, and only read when the seconds are asked for. Elsewhere ``now`` is the clock, in seconds.
    """

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self.is_cuda = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self.is_cuda else None  # of all phases
        self._now = now
        self._phases = [""]
        self._marks: list[tuple[str, Any]] = []  # the phase that begins, and when
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of a block towards a phase."""
        self._phases.append(name)
        self._mark()
        try:
            yield
        finally:
            self._phases.pop()
            self._mark()

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far; a phase that has not begun has none. Waits for the GPU."""
        if self.is_cuda and self._marks:
            torch.cuda.synchronize()
        for (name, start), (_, end) in pairwise(self._marks):
            self._seconds[name] += start.elapsed_time(end) / 1e3 if self.is_cuda else end - start
        self._marks = self._marks[-1:]
        return defaultdict(float, {name: s for name, s in self._seconds.items() if name})

    def _mark(self) -> None:
        now: Any = torch.cuda.Event(enable_timing=True) if self.is_cuda else self._now()
        if self.is_cuda:
            now.record(self._stream)
        self._marks.append((self._phases[-1], now))
