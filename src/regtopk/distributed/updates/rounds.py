"""How a rank makes local rounds: what all ranks do together, at once or beside training.

When a fragment is sent, when it is applied and what is kept is decided in regtopk/rounds.py.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.state.buckets import Bucket
from regtopk.distributed.state.layout import into, subtract_
from regtopk.distributed.steps.step import Step, Steps, Take, Vectors
from regtopk.distributed.transport.background import Background
from regtopk.distributed.updates.model import LocalModel
from regtopk.errors import ClusterError
from regtopk.rounds import RoundMaker, Rounds


class Flight:
    """A round that is made beside training.

    Args:
        background: what makes it.
        make_round: makes it; returns whether all ranks' updates were finite.
        device: where it works.
        tensors: what it works on, of the memory of training.
    """

    def __init__(
        self,
        background: Background,
        make_round: Callable[[], bool],
        device: torch.device,
        tensors: list[Tensor],
    ) -> None:
        self._device = device
        self._landed: Future[bool] = Future()
        self._sent, self._received = (torch.cuda.Event() if device.type == "cuda" else None for _ in range(2))
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(device))
        background.put(partial(self._run, make_round, tensors))

    def raise_failure(self) -> None:
        """Raise what went wrong, if that is known already."""
        if self._landed.done():
            self._landed.result()

    def wait(self) -> None:
        """Wait for the round's end, however it ends."""
        self._landed.exception()

    def land(self) -> bool:
        """Wait for the round's end; whether all ranks' updates were finite."""
        is_finite = self._landed.result()
        if self._received is not None:
            self._received.wait(torch.cuda.current_stream(self._device))
        return is_finite

    def _run(self, make_round: Callable[[], bool], tensors: list[Tensor]) -> None:
        try:
            if self._sent is not None:
                stream = torch.cuda.current_stream(self._device)
                self._sent.wait(stream)
                for tensor in tensors:  # must not be reused before this stream is done with it
                    if tensor.is_cuda:
                        tensor.record_stream(stream)
            is_finite = make_round()
            if self._received is not None:
                self._received.record(torch.cuda.current_stream(self._device))
            self._landed.set_result(is_finite)
        except BaseException as error:  # raised where the rank next looks
            self._landed.set_exception(error)


class RankRounds(RoundMaker):
    """The rounds of a rank's model.

    Args:
        steps: what makes them.
        model: whose updates are exchanged.
        rounds: when they are sent, and when they are applied.
    """

    def __init__(self, steps: Steps, model: LocalModel, rounds: Rounds) -> None:
        self._steps, self._model, self._rounds = steps, model, rounds
        self._clock = 0  # when something was last sent
        self._background = Background(steps.device) if rounds.delay else None
        self._flights: list[Flight | None] = [None] * rounds.fragments
        self._were_skipped: list[int] = []

    def load(self, skipped: list[int]) -> None:
        """When what is under way has ended, go on with rounds of which those of these fragments failed.

        Args:
            skipped: the fragments whose updates were not finite.
        """
        for fragment, flight in enumerate(self._flights):
            if flight is not None:
                flight.wait()
            self._flights[fragment] = None
        self._were_skipped = skipped

    def own(self, fragment: int) -> list[Tensor]:
        """This rank's parameters."""
        return self._model.own(self._model.fragments[fragment])

    def start(self, fragment: int) -> list[Tensor]:
        """theta_start of them."""
        return self._model.starts(self._model.fragments[fragment])

    def take_back(self) -> None:
        """Put buffers back; what a NaN has spoiled in the optimizer starts anew."""
        self._model.take_back()

    def gather(self, clock: int) -> int:
        """Note when something is sent."""
        self._clock = clock
        return clock

    def check_usable(self) -> None:
        """Raise what went wrong in a round that is under way, or before."""
        for flight in self._flights:
            if flight is not None:
                flight.raise_failure()
        self._steps.check_usable()

    @contextmanager
    def exchange(self, fragment: int, num_steps: int) -> Iterator[bool | None]:
        """A whole round at once: what follows belongs to its step."""
        model, rank = self._model, self._steps.rank
        take = partial(model.take_update, self._buckets_of(fragment))
        with model.at_hand(), ExitStack() as stack:
            step = self._exchanged(stack, fragment, take, model.outer, num_steps)
            with rank.timer.phase("decode_s"):
                yield step.is_finite
                if step.is_finite and self._is_last(fragment):
                    self._join_buffers(rank)

    def send(self, fragment: int, num_steps: int) -> None:
        """Start a round, which goes on beside training."""
        assert self._background is not None
        buckets = self._buckets_of(fragment)
        vectors = self._model.take_update(buckets)
        states = [tensor for bucket in buckets for tensor in bucket.state.state_dict().values()]
        tensors = [*vectors[0], *states, *self._model.start.values()]
        meet = partial(self._meet, fragment, vectors, self._model.outer_as_it_is(), num_steps)
        self._flights[fragment] = Flight(self._background, meet, self._steps.device, tensors)

    def land(self, fragment: int) -> bool:
        """Wait for the aggregate. Whether all updates were finite; if not, theta_start is as before."""
        flight = self._flights[fragment]
        return fragment not in self._were_skipped if flight is None else flight.land()

    @contextmanager
    def receive(self, fragment: int) -> Iterator[bool | None]:
        """Wait for the aggregate; what follows must not fail, or all ranks restart."""
        is_finite = self.land(fragment)
        with self._steps.half_way():
            yield is_finite
            if is_finite and self._is_last(fragment) and self._model.buffers.are_joined:
                self.land_all()  # whose collectives must not mix with these
                with self._steps.afterwards() as rank:
                    self._join_buffers(rank)
            elif is_finite and self._is_last(fragment):
                self._model.buffers.keep()

    def land_all(self) -> None:
        """Wait for all that is under way; it is applied when its time has come."""
        for flight in self._flights:
            if flight is not None:
                flight.land()

    def close(self) -> None:
        """Let what has begun end on all ranks."""
        if self._background is not None:
            self._background.close()

    def _meet(self, fragment: int, vectors: Vectors, outer: Optimizer | None, num_steps: int) -> bool:
        """A round beside training. Whether all ranks' updates were finite."""
        with ExitStack() as stack:
            return self._exchanged(stack, fragment, vectors, outer, num_steps).is_finite

    def _exchanged(
        self,
        stack: ExitStack,
        fragment: int,
        vectors: Vectors | Take,
        outer: Optimizer | None,
        num_steps: int,
    ) -> Step:
        """What ranks do together in a round: the aggregate gets into theta_start, if all updates are finite.

        Args:
            stack: in which the step goes on.
            fragment: whose round it is.
            vectors: its update, as the buckets' vectors.
            outer: what applies the aggregate.
            num_steps: how many steps of the optimizer the round has.
        """
        steps, model = self._steps, self._model
        try:
            step = stack.enter_context(steps.step(vectors, self._buckets_of(fragment), num_dense=num_steps))
        except ClusterError as error:
            if error.__cause__ is None:  # all ranks are here, but differ
                raise
            raise ClusterError(
                f"{error} Round {steps.num_turns} did not begin at step {self._clock} of this rank. If no "
                "rank has stopped: did every rank call optimizer.step() equally often? A step that a "
                "GradScaler skips does not count: count by num_steps, not by batches"
            ) from error
        if step.is_finite and outer is None:
            step.exchange(into(model.start, subtract_))
        elif step.is_finite:
            step.exchange(into(model.update))
            model.apply(outer, model.fragments[fragment])
        return step

    def _join_buffers(self, rank: Rank) -> None:
        buffers = self._model.buffers
        buffers.put(buffers.joined(rank, self._steps.device, buffers.named))

    def _is_last(self, fragment: int) -> bool:
        return fragment == self._rounds.fragments - 1

    def _buckets_of(self, fragment: int) -> list[Bucket]:
        names = set(self._model.fragments[fragment])
        return [bucket for bucket in self._steps.buckets.all if names.issuperset(bucket.names)]
