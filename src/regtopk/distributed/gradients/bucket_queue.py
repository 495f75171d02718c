"""Buckets exchanged while backward goes on, however many rounds an algorithm has."""

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.futures import Future

from regtopk.distributed.steps.step import Steps
from regtopk.distributed.transport.background import Background


@dataclass(eq=False)
class Arrival:
    """A bucket as DDP handed it over: the gradients are views of the buffer."""

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

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._failure: BaseException | None = None
        self._background = Background(steps.device)

    def put(self, arrival: Arrival) -> None:
        """Hand over a bucket; returns at once."""
        self._background.put(partial(self._answer, arrival))

    def raise_failure(self) -> None:
        """Raise what went wrong in the thread since the last call."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """End the thread, when it has exchanged what has arrived."""
        self._background.close()

    def _answer(self, arrival: Arrival) -> None:
        with self._steps.lock:
            try:
                if self._failure is None:
                    self._exchange(arrival)
            except BaseException as error:
                self._steps.take_back()
                self._failure = error  # a future cannot carry it through DDP: raised after backward
        arrival.future.set_result(arrival.buffer)

    def _exchange(self, arrival: Arrival) -> None:
        if arrival.ready is not None:
            arrival.ready.wait()
        if arrival.index == 0:
            self._steps.begin()
        self._steps.run_bucket(arrival.grads)
        if arrival.is_last:
            self._steps.end()
