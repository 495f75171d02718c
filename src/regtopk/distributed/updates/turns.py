"""The rounds of a model whose parts take turns: what is sent and applied, at once or with a delay."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from regtopk.distributed.state.buckets import Bucket
from regtopk.distributed.state.layout import into, subtract_
from regtopk.distributed.steps.step import Step, Steps, Take, Vectors
from regtopk.distributed.transport.background import Background
from regtopk.distributed.updates.fragments import Flight, Fragment
from regtopk.distributed.updates.model import LocalModel
from regtopk.errors import ClusterError
from regtopk.rounds import Rounds, cut_evenly


def fragments_of(model: LocalModel, num_fragments: int) -> list[Fragment]:
    """The parameters in so many parts of about the same size; those without entries are in none."""
    sizes = {name: p.numel() for name, p in model.parameters.named.items() if p.numel() > 0}
    names = list(sizes)
    parts = cut_evenly(list(sizes.values()), num_fragments)
    return [Fragment(tuple(names[i] for i in part)) for part in parts]


class Turns:
    """The rounds of all fragments of a model.

    Args:
        steps: what makes them.
        model: whose updates are exchanged.
        rounds: when they are sent, and when they are applied.
        fragments: the parts of the model.
    """

    def __init__(self, steps: Steps, model: LocalModel, rounds: Rounds, fragments: list[Fragment]) -> None:
        self._steps = steps
        self._model = model
        self._rounds = rounds
        self.fragments = fragments
        self.is_whole = True  # whether the model is theta_start, the same on all ranks
        self._num_steps = 0  # of the optimizer
        self._finished_at = 0  # how many there were when all fragments were last exchanged together
        self._background = Background(steps.device) if rounds.delay else None

    def after_step(self, num_steps: int) -> None:
        """Send and receive what is due after so many steps of the optimizer."""
        for fragment in self.fragments:
            if fragment.flight is not None:
                fragment.flight.raise_failure()
        self._steps.check_usable()
        self.is_whole, self._num_steps = False, num_steps
        for number, fragment in enumerate(self.fragments):
            if self._rounds.receives_at(number, num_steps) and fragment.sent:
                self._receive(fragment)
            if self._rounds.sends_at(number, num_steps):
                fragment.num_steps = self._num_since(number, num_steps - 1)
                if self._background is None:
                    self._make_round(fragment)
                else:
                    self._send(fragment, self._background)

    def finish(self) -> None:
        """Apply what is under way, and exchange what was learned since."""
        for fragment in self.fragments:
            if fragment.sent:
                self._receive(fragment)
        for number, fragment in enumerate(self.fragments if not self.is_whole else ()):
            fragment.num_steps = self._num_since(number, self._num_steps)
            self._make_round(fragment)
        self.is_whole, self._finished_at = True, self._num_steps

    def _num_since(self, number: int, latest: int) -> int:
        """How many steps there were since a fragment was exchanged, at the latest after so many."""
        sent = (at for at in range(latest, self._finished_at, -1) if self._rounds.sends_at(number, at))
        return self._num_steps - next(sent, self._finished_at)

    def land(self) -> None:
        """Wait for what is under way; it is applied when its time has come."""
        for fragment in self.fragments:
            if fragment.flight is not None:
                fragment.flight.land()

    def sent(self) -> dict[str, Tensor] | None:
        """By name, the parameters as they were sent, of rounds under way; None: the model is theta_start."""
        if self.is_whole:
            return None
        return {name: tensor for fragment in self.fragments for name, tensor in fragment.sent.items()}

    def skipped(self) -> list[bool]:
        """Of each fragment, whether its round is under way and was not finite."""
        return [bool(fragment.sent) and not fragment.land() for fragment in self.fragments]

    def forget(self) -> None:
        """Wait for what is under way, however it ends, and drop it."""
        for fragment in self.fragments:
            if fragment.flight is not None:
                fragment.flight.wait()
            fragment.clear()

    def load(self, num_steps: int, sent: dict[str, Tensor], skipped: list[bool], *, is_whole: bool) -> None:
        """Go on with what was under way after so many steps."""
        self.is_whole, self._num_steps, self._finished_at = is_whole, num_steps, 0
        for number, fragment in enumerate(self.fragments):
            fragment.sent = {
                name: tensor.to(self._steps.device, copy=True)
                for name, tensor in sent.items()
                if name in fragment.names
            }
            fragment.is_skipped = number < len(skipped) and skipped[number]

    def end_thread(self) -> None:
        """Let what has begun end on all ranks."""
        background, self._background = self._background, None
        if background is not None:
            background.close()

    def _make_round(self, fragment: Fragment) -> None:
        """Exchange an update, and go on from the aggregate."""
        model, buckets = self._model, self._buckets_of(fragment)
        with model.at_hand():
            model.parameters.check()
            model.parameters.check_trainable()
            self._meet(fragment, partial(model.take_update, buckets), model.outer, then=self._go_on)

    def _send(self, fragment: Fragment, background: Background) -> None:
        """Start the exchange of an update, which goes on beside training."""
        self._model.parameters.check()
        self._model.parameters.check_trainable()
        vectors = self._model.take_update(self._buckets_of(fragment))
        fragment.sent = self._model.copies(fragment.names)
        outer = self._model.outer_as_it_is()

        def make_round() -> bool:
            self._keep_for_this_stream(fragment, vectors[0])
            return self._meet(fragment, vectors, outer)

        fragment.flight = Flight(background, make_round, self._steps.device)

    def _receive(self, fragment: Fragment) -> None:
        """Wait for the aggregate, and go on from it with what was learned meanwhile."""
        is_finite = fragment.land()
        with self._steps.half_way():
            self._go_on(fragment, is_finite)
        fragment.clear()

    def _meet(
        self,
        fragment: Fragment,
        vectors: Vectors | Take,
        outer: Optimizer | None,
        then: Callable[[Fragment, bool], None] | None = None,
    ) -> bool:
        """What ranks do together in a round: the aggregate gets into theta_start.

        Args:
            fragment: whose round it is.
            vectors: its update, as the buckets' vectors.
            outer: what applies the aggregate.
            then: what follows, if it is applied at once.

        Returns:
            Whether all ranks' updates were finite; if not, nothing has changed.
        """
        with ExitStack() as stack:
            step = self._begun(stack, fragment, vectors)
            if step.is_finite:
                self._exchange(fragment, step, outer)
            if then is not None:
                with self._steps.rank.timer.phase("decode_s"):
                    then(fragment, step.is_finite)
        return step.is_finite

    def _begun(self, stack: ExitStack, fragment: Fragment, vectors: Vectors | Take) -> Step:
        """Wait until all ranks are here."""
        steps = self._steps
        step = steps.step(vectors, self._buckets_of(fragment), num_dense=fragment.num_steps)
        try:
            return stack.enter_context(step)
        except ClusterError as error:
            if error.__cause__ is None:  # all ranks are here, but differ
                raise
            raise ClusterError(
                f"{error} Round {steps.num_turns} did not begin at step {self._num_steps} of this rank. If "
                "no rank has stopped: did every rank call optimizer.step() equally often? A step that a "
                "GradScaler skips on one rank is none: count by num_steps, not by batches"
            ) from error

    def _exchange(self, fragment: Fragment, step: Step, outer: Optimizer | None) -> None:
        model = self._model
        if outer is None:
            step.exchange(into(model.start, subtract_))
        else:
            step.exchange(into(model.update))
            # theta_start is its parameters, the update their gradients
            model.apply_outer(outer, fragment.names)

    def _go_on(self, fragment: Fragment, is_finite: bool) -> None:
        """Begin a fragment's next round, the aggregate being in theta_start; or return to its beginning."""
        model = self._model
        if not is_finite:
            under_way = [other for other in self.fragments if other.sent]
            are_finite = [other.land() for other in under_way]
            model.take_back()  # the whole model: a NaN spreads
            for other, other_is_finite in zip(under_way, are_finite, strict=True):
                if other_is_finite:
                    other.sent = model.copies(other.names)  # what they learned before is gone
                else:  # this take-back is theirs, too
                    other.clear()
            self.is_whole = not any(other.sent for other in self.fragments if other is not fragment)
            return
        model.go_on(fragment.names, fragment.sent, self._rounds.mix)
        if fragment is self.fragments[-1] and model.buffers.are_joined:
            self._join_buffers()
        elif fragment is self.fragments[-1]:
            model.buffers.keep()
        self.is_whole = self.fragments == [fragment] and not fragment.sent

    def _join_buffers(self) -> None:
        """Make the buffers the same on all ranks."""
        self.land()  # whose collectives must not mix with these
        buffers, steps = self._model.buffers, self._steps
        if self._rounds.delay == 0:
            buffers.join(steps.rank, steps.device)
            return
        with steps.afterwards() as rank:
            buffers.join(rank, steps.device)

    def _keep_for_this_stream(self, fragment: Fragment, flats: list[Tensor]) -> None:
        """Memory of another stream must not be reused there before this stream is done with it."""
        if self._steps.device.type == "cuda":
            states = [t for bucket in self._buckets_of(fragment) for t in bucket.state.state_dict().values()]
            for tensor in (*flats, *states, *self._model.start.values()):
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream(self._steps.device))

    def _buckets_of(self, fragment: Fragment) -> list[Bucket]:
        names = set(fragment.names)
        return [bucket for bucket in self._steps.buckets.all if names.issuperset(bucket.names)]
