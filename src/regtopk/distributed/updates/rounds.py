"""How a rank makes local rounds: what all ranks do together, at once or beside training.

When a fragment is sent, when it is applied and what is kept is decided in regtopk/rounds.py.
"""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
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
from regtopk.rounds import LocalRounds, Rounds


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


class RankRounds(LocalRounds):
    """The local rounds of a rank's model.

    Args:
        steps: what makes them.
        model: whose updates are exchanged.
        rounds: when they are sent, and when they are applied.

    Attributes:
        clock: how many steps the optimizer has made.
    """

    def __init__(self, steps: Steps, model: LocalModel, rounds: Rounds) -> None:
        super().__init__(rounds)
        self._steps, self._model = steps, model
        self.clock = 0
        self._exchanged_at = [0] * rounds.fragments  # the step after which each fragment was last sent
        self._flights: list[Flight | None] = [None] * rounds.fragments
        self._were_skipped = [False] * rounds.fragments  # of rounds that were loaded under way
        self._background = Background(steps.device) if rounds.delay else None

    def own(self, fragment: int) -> list[Tensor]:
        """This rank's parameters."""
        return self._model.own(self._model.fragments[fragment])

    def start(self, fragment: int) -> list[Tensor]:
        """theta_start of them."""
        return self._model.starts(self._model.fragments[fragment])

    def take_back(self) -> None:
        """Return to theta_start; what a NaN has spoiled in the optimizer starts anew."""
        self._model.take_back()

    def after_step(self, num_steps: int) -> None:
        """Receive and send what is due after so many steps of the optimizer."""
        for flight in self._flights:
            if flight is not None:
                flight.raise_failure()
        self._steps.check_usable()
        before, self.clock = self.clock, num_steps
        try:
            super().after_step(num_steps)
        except BaseException:
            self.clock = before
            raise

    def finish(self) -> None:
        """Receive what is under way; then exchange every fragment, unless the model is theta_start."""
        super().finish()
        self._exchanged_at = [self.clock] * self.rounds.fragments

    # A round.

    def exchange(self, fragment: int) -> None:
        """A whole round at once."""
        model = self._model
        with model.at_hand():
            take = partial(model.take_update, self._buckets_of(fragment))
            self._meet(fragment, take, model.outer, self._num_since(fragment), is_at_once=True)

    def send(self, fragment: int) -> None:
        """Start a round, which goes on beside training."""
        assert self._background is not None
        buckets = self._buckets_of(fragment)
        vectors = self._model.take_update(buckets)
        outer, num_steps = self._model.outer_as_it_is(), self._num_since(fragment)
        states = [tensor for bucket in buckets for tensor in bucket.state.state_dict().values()]
        tensors = [*vectors[0], *states, *self._model.start.values()]
        meet = partial(self._meet, fragment, vectors, outer, num_steps)
        self._flights[fragment] = Flight(self._background, meet, self._steps.device, tensors)

    def land(self, fragment: int) -> bool:
        """Wait for the aggregate. Whether all updates were finite; if not, theta_start is as before."""
        flight = self._flights[fragment]
        return not self._were_skipped[fragment] if flight is None else flight.land()

    def receive(self, fragment: int) -> None:
        """Wait for the aggregate, and go on from it with what was learned meanwhile."""
        is_finite = self.land(fragment)
        with self._steps.half_way():
            self.go_on(fragment, is_finite)
            if not is_finite or not self._is_last(fragment):
                return
            if self._model.buffers.are_joined:
                self.land_all()  # whose collectives must not mix with these
                with self._steps.afterwards() as rank:
                    self._join_buffers(rank)
            else:
                self._model.buffers.keep()

    def _num_since(self, fragment: int) -> int:
        """How many steps there were since a fragment was exchanged, which it is now."""
        before, self._exchanged_at[fragment] = self._exchanged_at[fragment], self.clock
        return self.clock - before

    def _meet(
        self,
        fragment: int,
        vectors: Vectors | Take,
        outer: Optimizer | None,
        num_steps: int,
        *,
        is_at_once: bool = False,
    ) -> bool:
        """What ranks do together in a round: the aggregate gets into theta_start.

        Args:
            fragment: whose round it is.
            vectors: its update, as the buckets' vectors.
            outer: what applies the aggregate.
            num_steps: how many steps of the optimizer the round has.
            is_at_once: whether to go on from the aggregate.

        Returns:
            Whether all ranks' updates were finite; if not, nothing has changed.
        """
        with ExitStack() as stack:
            step = self._begun(stack, fragment, vectors, num_steps)
            if step.is_finite and outer is None:
                step.exchange(into(self._model.start, subtract_))
            elif step.is_finite:
                step.exchange(into(self._model.update))
                self._model.apply(outer, self._model.fragments[fragment])
            if is_at_once:
                with self._steps.rank.timer.phase("decode_s"):
                    self.go_on(fragment, step.is_finite)
                    if step.is_finite and self._is_last(fragment):
                        self._join_buffers(self._steps.rank)
        return step.is_finite

    def _begun(self, stack: ExitStack, fragment: int, vectors: Vectors | Take, num_steps: int) -> Step:
        """Wait until all ranks are here."""
        steps = self._steps
        try:
            return stack.enter_context(steps.step(vectors, self._buckets_of(fragment), num_dense=num_steps))
        except ClusterError as error:
            if error.__cause__ is None:  # all ranks are here, but differ
                raise
            raise ClusterError(
                f"{error} Round {steps.num_turns} did not begin at step {self.clock} of this rank. If no "
                "rank has stopped: did every rank call optimizer.step() equally often? A step that a "
                "GradScaler skips does not count: count by num_steps, not by batches"
            ) from error

    def _join_buffers(self, rank: Rank) -> None:
        buffers = self._model.buffers
        buffers.put(buffers.joined(rank, self._steps.device, buffers.named))

    def _is_last(self, fragment: int) -> bool:
        return fragment == self.rounds.fragments - 1

    def _buckets_of(self, fragment: int) -> list[Bucket]:
        names = set(self._model.fragments[fragment])
        return [bucket for bucket in self._steps.buckets.all if names.issuperset(bucket.names)]

    # What is under way.

    def land_all(self) -> None:
        """Wait for all that is under way; it is applied when its time has come."""
        for flight in self._flights:
            if flight is not None:
                flight.land()

    def sent_by_name(self) -> dict[str, Tensor] | None:
        """The parameters as they were sent, of rounds under way; None: the model is theta_start."""
        if self.is_start:
            return None
        parts = zip(self._model.fragments, self.sent, strict=True)
        return {name: tensor for names, sent in parts for name, tensor in zip(names, sent, strict=False)}

    def are_skipped(self) -> list[bool]:
        """Of each fragment, whether its round is under way and was not finite."""
        return [bool(sent) and not self.land(fragment) for fragment, sent in enumerate(self.sent)]

    def load(self, num_steps: int, sent: dict[str, Tensor], skipped: list[bool], *, is_start: bool) -> None:
        """Go on with what was under way after so many steps, when what is under way now has ended."""
        for flight in self._flights:
            if flight is not None:
                flight.wait()
        fragments = range(self.rounds.fragments)
        self._flights = [None for _ in fragments]
        self._is_start, self.clock = is_start, num_steps
        self._exchanged_at = [self.rounds.last_send(fragment, num_steps) for fragment in fragments]
        device = self._steps.device
        self.sent = [
            [sent[name].to(device, copy=True) for name in names if name in sent]
            for names in self._model.fragments
        ]
        self._were_skipped = [fragment < len(skipped) and skipped[fragment] for fragment in fragments]

    def close(self) -> None:
        """Let what has begun end on all ranks."""
        if self._background is not None:
            self._background.close()
