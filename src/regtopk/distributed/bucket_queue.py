"""Buckets exchanged while backward goes on: a queue drained by one thread.

One thread on one process group means that the rounds of all buckets run in the same order on every rank,
however many rounds an algorithm has.
"""

import math
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.futures import Future

from regtopk.distributed.groups import Group

if TYPE_CHECKING:
    from regtopk.distributed.exchange import Exchange


@dataclass(eq=False)
class Arrival:
    """A bucket as DDP handed it over: the gradients are views of the buffer."""

    names: tuple[str, ...]
    grads: dict[str, Tensor]
    buffer: Tensor
    index: int
    is_last: bool
    future: Future[Tensor] = field(init=False)
    ready: torch.cuda.Event | None = None

    def __post_init__(self) -> None:
        """The future that DDP waits for; on CUDA it carries the stream's progress along."""
        on_device: list[int | str | torch.device] = [self.buffer.device] if self.buffer.is_cuda else []
        self.future = Future(devices=on_device)
        if self.buffer.is_cuda:
            self.ready = torch.cuda.Event()
            self.ready.record()


class BucketQueue:
    """Exchanges arrivals one after another in a thread of its own.

    A step in which some rank's gradient is not finite, that fails, or that backward never finishes, is taken
    back as a whole: buckets exchanged by then get their state from before the step.
    """

    def __init__(self, exchange: "Exchange") -> None:
        self.exchange = exchange
        self.was_skipped = False
        self._failure: BaseException | None = None
        self._exchanged: list[Group] = []  # in this step
        self._arrivals: queue.SimpleQueue[Arrival | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, arrival: Arrival) -> None:
        """Hand over a bucket; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="regtopk-exchange", daemon=True)
            self._thread.start()
        self._arrivals.put(arrival)

    def raise_failure(self) -> None:
        """Raise what went wrong in the thread since the last call."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._arrivals.put(None)
            self._thread.join()
            self._thread = None

    @torch.no_grad()
    def _run(self) -> None:
        device = self.exchange.device
        if device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream(device)):
                self._drain()
        else:
            self._drain()

    def _drain(self) -> None:
        while (arrival := self._arrivals.get()) is not None:
            try:
                if self._failure is None:
                    self._exchange(arrival)
            except BaseException as error:
                self._take_back()
                self._failure = error  # a future cannot carry it through DDP: raised after backward
            arrival.future.set_result(arrival.buffer)

    def _exchange(self, arrival: Arrival) -> None:
        exchange = self.exchange
        if arrival.ready is not None:
            arrival.ready.wait()
        if arrival.index == 0:
            self._take_back()
            self.was_skipped = False
            exchange.begin_step()
        groups = exchange.groups.covering(arrival.names, exchange.cut)
        flats = [exchange.flat_gradient(group, arrival.grads) for group in groups]
        is_finite = exchange.agree_finite(groups, flats)
        self.was_skipped |= not is_finite
        for group, flat in zip(groups, flats, strict=True):
            aggregate = flat.fill_(math.nan) if self.was_skipped else self._aggregate(group, flat)
            exchange.write_back(group, arrival.grads, aggregate)
        if arrival.is_last:
            if self.was_skipped:
                self._take_back()
            self._exchanged = []
            exchange.end_step(is_finite=not self.was_skipped)

    def _aggregate(self, group: Group, flat: Tensor) -> Tensor:
        with self.exchange.driver.watch.phase("select_s"):
            group.remember_state()
        self._exchanged.append(group)
        return self.exchange.aggregate(group, flat)

    def _take_back(self) -> None:
        for group in self._exchanged:
            group.take_back_state()
        self._exchanged = []
