"""How a rank makes local rounds: what all ranks do together, at once or beside training.

When a fragment is sent, when it is applied and what is kept is decided in regtopk/rounds.py.
"""

import atexit
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from regtopk import kernels
from regtopk.distributed.state.buckets import Bucket, into, subtract_
from regtopk.distributed.steps.step import Step, Steps, Take, Vectors
from regtopk.distributed.updates.model import LocalModel
from regtopk.distributed.updates.optimizers import restart_spoiled
from regtopk.errors import ClusterError
from regtopk.rounds import RoundMaker, Rounds

# how a round beside training ended: were all updates finite, and what to wait for before theta_start is read
Landing = tuple[bool, torch.cuda.Event | None]


class RankRounds(RoundMaker):
    """The rounds of a rank's model."""

    def __init__(self, steps: Steps, model: LocalModel, rounds: Rounds) -> None:
        self._steps, self._model, self._rounds = steps, model, rounds
        self._background = Background(steps.device)
        self._flights: dict[int, Future[Landing]] = {}  # the last round beside training of each fragment
        self.tokens = [-1.0] * rounds.fragments  # since each was last sent; below zero: none were counted
        self._sent_tokens: dict[int, float] = {}

    def count(self, tokens: float) -> None:
        """Add what the coming step learns from."""
        self.tokens = [max(counted, 0.0) + tokens for counted in self.tokens]

    def load(self, skipped: Sequence[bool], tokens: Sequence[float] = ()) -> None:
        """When what is under way has ended, go on with fragments of which some were not finite."""
        self.tokens = list(tokens) or [0.0] * self._rounds.fragments
        for fragment, flight in self._flights.items():
            if flight.exception() is None:  # waits, however it ends
                self.land(fragment)
        self._flights = {fragment: Future() for fragment, is_skipped in enumerate(skipped) if is_skipped}
        for flight in self._flights.values():
            flight.set_result((False, None))

    def own(self, fragment: int) -> list[Tensor]:
        """This rank's parameters."""
        return self._model.own(self._model.fragments[fragment])

    def start(self, fragment: int) -> list[Tensor]:
        """theta_start of them."""
        return self._model.starts(self._model.fragments[fragment])

    def take_back(self) -> None:
        """Put buffers back; what a NaN has spoiled in the optimizers starts anew."""
        self._model.buffers.take_back()
        self.tokens = [-1.0] * self._rounds.fragments
        for optimizer in self._model.inner.all:
            restart_spoiled(optimizer, self._steps.others)

    def check_usable(self) -> None:
        """Raise what went wrong in a round that is under way, or before."""
        for flight in self._flights.values():
            if flight.done():
                flight.result()
        self._steps.check_usable()

    @contextmanager
    def exchange(self, fragment: int, num_steps: int) -> Iterator[bool | None]:
        """A whole round at once: what follows belongs to its step."""
        model, rank = self._model, self._steps.rank
        self._take_tokens(fragment, num_steps)
        take = partial(model.take_update, self._buckets_of(fragment))
        counted = self._step(fragment, take, model.outer, num_steps)
        with model.at_hand(), counted as step, rank.timer.phase("decode_s"):
            yield step.is_finite
            if step.is_finite and self._is_last(fragment):
                self._join_buffers()

    def send(self, fragment: int, num_steps: int) -> None:
        """Start a round, which goes on beside training."""
        buckets, device = self._buckets_of(fragment), self._steps.device
        self._take_tokens(fragment, num_steps)
        vectors = self._model.take_update(buckets)
        meet = partial(self._meet, fragment, vectors, self._model.outer_as_it_is(), num_steps)
        states = [tensor for bucket in buckets for tensor in bucket.state.state_dict().values()]
        tensors = [*vectors[0], *states, *self._model.start.values()]
        sent = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._flights[fragment] = Future()
        self._background.put(partial(_fly, self._flights[fragment], meet, tensors, sent))

    def land(self, fragment: int) -> bool:
        """Wait for the aggregate. Whether all updates were finite; if not, theta_start is as before."""
        if fragment not in self._flights:
            return True
        is_finite, written = self._flights[fragment].result()
        if written is not None:
            torch.cuda.current_stream(self._steps.device).wait_event(written)
        return is_finite

    @contextmanager
    def receive(self, fragment: int) -> Iterator[bool | None]:
        """Wait for the aggregate; what follows must not fail, or all ranks restart."""
        is_finite = self.land(fragment)
        with self._steps.half_way():
            yield is_finite
            if is_finite and self._is_last(fragment) and self._model.buffers.are_joined:
                self.land_all()  # whose collectives must not mix with these
                rank = self._steps.rank
                rank.begin(self._steps.device)
                self._join_buffers()
                self._steps.ledger.add_to_total(rank.record, rank.timer)  # of a step that is counted
            elif is_finite and self._is_last(fragment):
                self._model.buffers.keep()

    def land_all(self) -> None:
        """Wait for all that is under way; it is applied when its time has come."""
        for fragment in self._flights:
            self.land(fragment)

    def close(self) -> None:
        """Let what has begun end on all ranks."""
        self._background.close()

    def _meet(self, fragment: int, vectors: Vectors | Take, outer: Optimizer | None, num_steps: int) -> bool:
        """A round beside training. Whether all ranks' updates were finite."""
        with self._step(fragment, vectors, outer, num_steps) as step:
            return step.is_finite

    @contextmanager
    def _step(
        self, fragment: int, vectors: Vectors | Take, outer: Optimizer | None, num_steps: int
    ) -> Iterator[Step]:
        """What ranks do together: the aggregate gets into theta_start, if all updates are finite."""
        steps, model, step = self._steps, self._model, None
        buckets, tokens = self._buckets_of(fragment), self._sent_tokens[fragment]
        try:
            with steps.step(vectors, buckets, num_dense=num_steps, tokens=tokens) as step:
                if step.is_finite and outer is None:
                    step.exchange(into(model.start, subtract_))
                elif step.is_finite:
                    step.exchange(into(model.update))
                    model.apply(outer, model.fragments[fragment])
                yield step
        except ClusterError as error:
            if step is None:
                self.tokens[fragment] = -1.0 if math.isnan(tokens) else tokens
            if step is not None or error.__cause__ is None:  # all ranks were here, and failed or differ
                raise
            raise ClusterError(
                f"{error} Round {steps.num_turns} did not begin. If no rank has stopped: did every rank call "
                "optimizer.step() as often as its `every` says? A step that a GradScaler skips does not "
                "count: count by num_steps, not by batches"
            ) from error

    def _take_tokens(self, fragment: int, num_steps: int) -> None:
        """What an update of so many steps was learned from; NaN if nobody has counted."""
        counted, self.tokens[fragment] = self.tokens[fragment], -1.0
        self._sent_tokens[fragment] = math.nan if counted < 0 < num_steps else max(counted, 0.0)

    def _join_buffers(self) -> None:
        buffers, steps = self._model.buffers, self._steps
        now = buffers.named if buffers.are_joined else {}
        buffers.put(buffers.joined(steps.rank, steps.device, now))

    def _is_last(self, fragment: int) -> bool:
        return fragment == self._rounds.fragments - 1

    def _buckets_of(self, fragment: int) -> list[Bucket]:
        names = set(self._model.fragments[fragment])
        return [bucket for bucket in self._steps.buckets.all if names.issuperset(bucket.names)]


def _fly(
    flight: Future[Landing], meet: Callable[[], bool], tensors: list[Tensor], sent: torch.cuda.Event | None
) -> None:
    """Make a round in another thread, on tensors of training as they were when `sent` was recorded."""
    try:
        if sent is None:
            flight.set_result((meet(), None))
            return
        stream = torch.cuda.current_stream(tensors[0].device)
        sent.wait(stream)
        for tensor in tensors:  # must not be reused before this stream is done with it
            if tensor.is_cuda:
                tensor.record_stream(stream)
        flight.set_result((meet(), stream.record_event()))
    except BaseException as error:  # raised where the rank next looks
        if sent is not None:
            with suppress(RuntimeError):  # the first error tells more
                torch.cuda.synchronize(tensors[0].device)  # nothing may still write
        flight.set_exception(error)


class Background:
    """Makes calls one after another, by a thread that starts with the first; they must not raise.

    One thread on one process group means that collectives run in the same order on every rank. On a CUDA
    device the calls have a stream of their own.
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
