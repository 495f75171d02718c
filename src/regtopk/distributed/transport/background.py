"""Calls beside training: made one after another, in the order they were handed over, by one thread.

One thread on one process group means that collectives run in the same order on every rank.
"""

import atexit
import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext

import torch

from regtopk import kernels


class Background:
    """A thread that starts with the first call; what it is handed must not raise.

    On a CUDA device the calls have a stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], None]) -> None:
        """Hand over a call; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="regtopk-exchange", daemon=True)
            self._thread.start()
            # a thread that outlives Python, after an error in backward say, ends the process by SIGABRT
            atexit.register(self.close, 10)
        self._calls.put(call)

    def close(self, timeout_s: float | None = None) -> None:
        """End the thread, when it has made all calls."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(timeout_s)
            self._thread = None
            atexit.unregister(self.close)

    @torch.no_grad()
    def _run(self) -> None:
        kernels.capture_nothing_in_this_thread()  # training runs beside it
        is_cuda = self._device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream(self._device)) if is_cuda else nullcontext():
            while (call := self._calls.get()) is not None:
                call()
            if is_cuda:  # nothing is under way on the device when the thread has ended
                torch.cuda.current_stream(self._device).synchronize()
