"""What workers exchange and how often (`Rounds`), and the local rounds that every kind of driver runs.

`Rounds` are written as words of a method, DiLoCo as "dense:exchange=updates:every=16:outer=nesterov".
`LocalRounds` decides what is sent, applied and kept, and when. A `RoundMaker` does it: there is one for
ranks, one for torchft's replicas and one for the simulator.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regtopk.core.options import MOST, check_choice, check_integer, check_number, check_positive
from regtopk.errors import ArgumentError

EXCHANGES = ("gradients", "updates")
ADVISED_UPDATES = "topk:value_code=4bit:impute=0.35"  # what was measured best (README)


class Outer(NamedTuple):
    """What is applied after an exchange of updates: SGD that takes the aggregate for a gradient."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False


OUTER = {"none": Outer(), "sgd": Outer(), "nesterov": Outer(lr=0.7, momentum=0.9, nesterov=True)}


def cut_evenly(sizes: Sequence[int], num_parts: int) -> list[range]:
    """Parameters of these sizes in fragments of about the same size: neighbours, at least one in each."""
    if num_parts > len(sizes):
        raise ArgumentError(f"fragments must be at most {len(sizes)}, one per parameter, got {num_parts}")
    parts, first, left = [], 0, sum(sizes)
    for num_more in range(num_parts - 1, -1, -1):
        wanted, stop, taken = left / (num_more + 1), first + 1, sizes[first]
        while stop < len(sizes) - num_more and (taken + sizes[stop] / 2 <= wanted or num_more == 0):
            taken += sizes[stop]
            stop += 1
        parts.append(range(first, stop))
        first, left = stop, left - taken
    return parts


class Rounds(NamedTuple):
    """What a worker sends, and after how many steps.

    With gradients, the aggregate of every step goes to one optimizer. With updates, every worker has its own
    parameters and its own optimizer: see `LocalRounds`, and for the times `regtopk.UpdateExchange`.
    """

    exchange: str = "gradients"  # or updates
    every: int = 1
    outer: str = "none"  # applies the aggregate as it is; sgd and nesterov take it for a gradient
    outer_lr: float | None = None  # None: 1 for sgd and, as DiLoCo has it, 0.7 for nesterov
    outer_momentum: float | None = None  # in [0, 1); None: 0 for sgd, 0.9 for nesterov
    delay: int = 0
    fragments: int = 1
    mix: float = 1.0
    clip_norm: float | None = None
    by_worker: tuple[int, ...] = ()  # every of each worker, written every=4/4/1: `every` is then the largest

    @property
    def has_updates(self) -> bool:
        """Whether updates are exchanged, not gradients."""
        return self.exchange == "updates"

    @property
    def told_every(self) -> int | list[int]:
        """As records and saved states have it: one number, or one of each worker."""
        return list(self.by_worker) or self.every

    @property
    def outer_settings(self) -> Outer:
        """The settings of `outer`, defaults included."""
        given: dict[str, Any] = {"lr": self.outer_lr, "momentum": self.outer_momentum}
        outer = OUTER[self.outer]._replace(**{name: x for name, x in given.items() if x is not None})
        return outer._replace(nesterov=outer.nesterov and outer.momentum != 0)  # torch's needs some

    def make_outer(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        """The optimizer that applies an aggregate of updates; none is SGD with a learning rate of 1."""
        return torch.optim.SGD(parameters, **self.outer_settings._asdict())

    def check(self, label: str) -> None:
        """Refuse values that break their rule; `label` has the words of the method, for messages."""
        check_choice("exchange", self.exchange, EXCHANGES)
        if not self.has_updates and self != GRADIENTS:
            given = [name for name in self._fields if getattr(self, name) != getattr(GRADIENTS, name)]
            raise ArgumentError(f"{' and '.join(given)} must stand with exchange=updates, got {label!r}")
        self.check_times()
        for every in self.by_worker:
            self._replace(every=every).check_times()
            pause, rest = divmod(every, self.fragments)
            if rest or self.delay >= pause:
                raise ArgumentError(
                    "every of each worker must be a multiple of fragments, and delay less than every // "
                    f"fragments, got {label!r}"
                )
        check_choice("outer", self.outer, OUTER)
        if self.outer == "none" and (self.outer_lr is not None or self.outer_momentum is not None):
            raise ArgumentError(f"outer_lr and outer_momentum need an outer other than none, got {label!r}")
        settings: Any = self.outer_settings
        check_positive("outer_lr", settings.lr)
        check_number("outer_momentum", settings.momentum, "in [0, 1)", lambda x: 0 <= x < 1)

    def check_times(self) -> None:
        """Refuse times at which no round can be made."""
        check_integer("every", self.every, at_least=1, at_most=MOST)
        for name, least, most in (("delay", 0, self.every - 1), ("fragments", 1, self.every)):
            value, rule = getattr(self, name), f"an integer from {least} to {most} with every = {self.every}"
            if type(value) is not int or not least <= value <= most:
                raise ArgumentError(f"{name} must be {rule}, got {value!r}")
        check_number("mix", self.mix, "in [0, 1]", lambda x: 0 <= x <= 1)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)

    def due(self, step: int) -> list[int]:
        """The fragments that are sent after so many steps."""
        return [part for part in range(self.fragments) if self.last_send(part, step) == step > 0]

    def last_send(self, fragment: int, step: int) -> int:
        """After how many steps, at most so many, a fragment was last sent; 0: not yet."""
        return max(0, step - (step - self.step_after(fragment + 1)) % self.every)

    def num_sent(self, step: int) -> int:
        """How many fragments are sent in so many steps. Ranks whose `every` differ meet by this number."""
        return sum((step - self.step_after(n)) // self.every + 1 for n in range(1, self.fragments + 1))

    def step_after(self, num_sent: int) -> int:
        """After how many steps so many fragments are sent."""
        return num_sent * self.every // self.fragments

    def makes_step(self, worker: int, step: int) -> bool:
        """Whether a worker takes part in a step of the fastest: in the first ones, then it waits to send."""
        if not self.by_worker:
            return True
        own, num_sent = self._replace(every=self.by_worker[worker]), self.num_sent(step)
        return step - self.step_after(num_sent) < own.step_after(num_sent + 1) - own.step_after(num_sent)

    def next_send(self, step: int) -> int:
        """After how many steps, more than so many, the next fragment is sent."""
        return min(self.last_send(fragment, step + self.every) for fragment in range(self.fragments))


GRADIENTS = Rounds()


class RoundMaker(ABC):
    """How workers of one kind send an update, and how its aggregate gets into theta_start.

    An outcome says whether all updates were finite. None: the round does not count, and nothing has changed.
    """

    @abstractmethod
    def own(self, fragment: int) -> list[Tensor]:
        """What this worker trains, of a fragment: theta_n."""

    @abstractmethod
    def start(self, fragment: int) -> list[Tensor]:
        """Where all workers began: theta_start."""

    @abstractmethod
    def send(self, fragment: int, num_steps: int) -> None:
        """Send a fragment's update of so many steps. When `land` returns, theta_start holds the aggregate."""

    def land(self, fragment: int) -> bool:
        """Wait for the aggregate. Whether all updates were finite; if not, theta_start is as before."""
        return True

    @contextmanager
    def receive(self, fragment: int) -> Iterator[bool | None]:
        """Wait for the aggregate; the worker goes on from it inside the block, which gets the outcome."""
        yield self.land(fragment)

    @contextmanager
    def exchange(self, fragment: int, num_steps: int) -> Iterator[bool | None]:
        """A whole round at once; the worker goes on from the aggregate inside the block."""
        self.send(fragment, num_steps)
        yield self.land(fragment)

    def gather(self, clock: int, num_steps: int) -> tuple[int, int]:
        """Before something is sent: where the schedule stands, and how many steps count as made."""
        return clock, num_steps

    def take_back(self) -> None:  # noqa: B027 -- the simulator has nothing else
        """Return to where the round began with what there is beside parameters."""


class LocalRounds:
    """The rounds of a model whose fragments take turns.

    theta_n     := optimizer(theta_n)                   in every step, each worker by itself
    sent        := theta_n                              when a fragment's turn has come
    theta_start := theta_start - outer(sum of w_n (theta_start - sent))
    theta_n     := theta_start + mix (theta_n - sent)   `delay` steps after it was sent

    If an update is not finite the round is skipped. The whole model returns to theta_start: a NaN spreads.
    """

    def __init__(self, rounds: Rounds, maker: RoundMaker) -> None:
        self.rounds, self._maker = rounds, maker
        self._fragments = range(rounds.fragments)
        self.begin(0, 0)

    def begin(self, num_steps: int, clock: int) -> None:
        """Go on from theta_start after so many steps."""
        self.num_steps = num_steps  # of the optimizer, those of the peer it has joined included
        self.clock = clock  # of the schedule: behind num_steps, if rounds did not count and were made again
        self._is_start = True
        self.sent: list[list[Tensor]] = [[] for _ in self._fragments]  # as it was, while it is under way
        self._exchanged_at = [num_steps for _ in self._fragments]
        self._before = list(self._exchanged_at)  # the same before the last send, which may not count

    def load(self, num_steps: int, sent: list[list[Tensor]], *, is_start: bool) -> None:
        """Go on after so many steps, with what was under way then."""
        self.begin(num_steps, num_steps)
        self.sent, self._is_start = sent, is_start
        if not is_start:  # else none has made a step since
            self._exchanged_at = [self.rounds.last_send(fragment, num_steps) for fragment in self._fragments]

    @property
    def is_start(self) -> bool:
        """Whether the model is theta_start, and nothing is under way."""
        return self._is_start and not any(self.sent)

    def after_step(self) -> None:
        """The optimizer has made a step: receive and send what is due."""
        self.num_steps += 1
        clock = self.clock + 1
        if self.rounds.due(clock):
            clock, self.num_steps = self._maker.gather(clock, self.num_steps)
        self._is_start = False
        sent, due = self.rounds.due(clock - self.rounds.delay), self.rounds.due(clock)
        for fragment in self._fragments:
            if fragment in sent and self.sent[fragment]:
                self._receive(fragment)
            if fragment in due and self.rounds.delay:
                self._maker.send(fragment, self._num_since(fragment))
                self.sent[fragment] = self._copies(fragment)
            elif fragment in due:
                self.exchange(fragment)
        self.clock = clock

    def finish(self, are_all: Callable[[bool], bool]) -> None:
        """Receive what is under way; then exchange every fragment, unless all workers are at theta_start."""
        for fragment in self._fragments:
            if self.sent[fragment]:
                self._receive(fragment)
        for fragment in self._fragments if not are_all(self.is_start) else ():
            self.exchange(fragment)
        self.begin(self.num_steps, self.clock)

    def exchange(self, fragment: int) -> None:
        """A whole round at once."""
        with self._maker.exchange(fragment, self._num_since(fragment)) as outcome:
            self._go_on(fragment, outcome)

    def _receive(self, fragment: int) -> None:
        with self._maker.receive(fragment) as outcome:
            self._go_on(fragment, outcome)

    def _num_since(self, fragment: int) -> int:
        """How many steps there were since a fragment was exchanged, which it is now."""
        self._before[fragment], self._exchanged_at[fragment] = self._exchanged_at[fragment], self.num_steps
        return self.num_steps - self._before[fragment]

    def _go_on(self, fragment: int, outcome: bool | None) -> None:
        """Begin a fragment's next round from theta_start, which the aggregate is in; or skip the round."""
        sent, self.sent[fragment] = self.sent[fragment], []
        if outcome is None:  # its steps belong to the next round
            self._exchanged_at[fragment] = self._before[fragment]
            return
        if not outcome:
            self._skip()
            return
        own, start = self._maker.own(fragment), self._maker.start(fragment)
        if sent:
            for mine, before, begun in zip(own, sent, start, strict=True):
                learned = mine.to(begun.dtype) - before.to(begun.dtype)
                mine.copy_(begun + learned.mul_(self.rounds.mix))
        else:
            torch._foreach_copy_(own, start)
        self._is_start = self.rounds.fragments == 1 and not sent

    def _skip(self) -> None:
        """Return to theta_start, with the aggregates of the other fragments that are under way."""
        under_way = [fragment for fragment, sent in enumerate(self.sent) if sent]
        are_finite = [self._maker.land(fragment) for fragment in under_way]
        for fragment in self._fragments:
            torch._foreach_copy_(self._maker.own(fragment), self._maker.start(fragment))
        self._maker.take_back()
        for fragment, is_finite in zip(under_way, are_finite, strict=True):
            # what they have learned is gone; if they are not finite either, they were taken back just now
            self.sent[fragment] = self._copies(fragment) if is_finite else []
        self._is_start = True

    def _copies(self, fragment: int) -> list[Tensor]:
        return [own.detach().clone() for own in self._maker.own(fragment)]
