"""What workers exchange, and how often: gradients in every step, or the updates of several local steps.

Written as words of a method: "topk:exchange=updates:every=2", or, as DiLoCo,
"dense:exchange=updates:every=16:outer=nesterov".
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regtopk.core.options import check_choice, check_integer, check_number, check_positive
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
    """Neighbours in so many parts of about the same sum; every part holds at least one.

    Args:
        sizes: at least as many as there are parts.
        num_parts: how many parts.
    """
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
    parameters and its own optimizer. After `every` steps the workers exchange theta_start - theta_n, and all
    go on from theta_start - outer(aggregate).

    With a delay, workers go on by themselves while the aggregate is under way, and add to it what they have
    learned meanwhile. With fragments, parts of the model take turns.

    Args:
        exchange: gradients or updates.
        every: steps that a worker takes by itself before an exchange of updates, >= 1.
        outer: none applies the aggregate as it is; sgd and nesterov take it for a gradient.
        outer_lr: learning rate of outer; None: 1 for sgd and, as DiLoCo has it, 0.7 for nesterov.
        outer_momentum: in [0, 1); None: 0 for sgd, 0.9 for nesterov, which needs some.
        delay: steps from sending an update to applying the aggregate, 0 to every - 1.
        fragments: parts of the model, 1 to every, whose rounds are evenly spread over `every` steps.
        mix: in [0, 1], how much is kept of what a worker has learned during the delay.
    """

    exchange: str = "gradients"
    every: int = 1
    outer: str = "none"
    outer_lr: float | None = None
    outer_momentum: float | None = None
    delay: int = 0
    fragments: int = 1
    mix: float = 1.0

    @property
    def has_updates(self) -> bool:
        """Whether updates are exchanged, not gradients."""
        return self.exchange == "updates"

    @property
    def outer_settings(self) -> Outer:
        """The settings of `outer`, defaults included."""
        settings = OUTER[self.outer]
        lr = settings.lr if self.outer_lr is None else self.outer_lr
        momentum = settings.momentum if self.outer_momentum is None else self.outer_momentum
        return Outer(lr, momentum, settings.nesterov)

    def make_outer(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        """The optimizer that applies an aggregate of updates; none is SGD with a learning rate of 1."""
        return torch.optim.SGD(parameters, **self.outer_settings._asdict())

    def check(self, label: str) -> None:
        """Refuse values that break their rule.

        Args:
            label: the words of the method, for messages.
        """
        check_choice("exchange", self.exchange, EXCHANGES)
        if not self.has_updates and self != GRADIENTS:
            given = [name for name in self._fields if getattr(self, name) != getattr(GRADIENTS, name)]
            raise ArgumentError(f"{' and '.join(given)} must stand with exchange=updates, got {label!r}")
        self.check_times()
        check_choice("outer", self.outer, OUTER)
        if self.outer == "none" and (self.outer_lr is not None or self.outer_momentum is not None):
            raise ArgumentError(f"outer_lr and outer_momentum need an outer other than none, got {label!r}")
        settings: Any = self.outer_settings
        check_positive("outer_lr", settings.lr)
        if settings.nesterov:
            check_number("outer_momentum", settings.momentum, "in (0, 1) for nesterov", lambda x: 0 < x < 1)
        check_number("outer_momentum", settings.momentum, "in [0, 1)", lambda x: 0 <= x < 1)

    def check_times(self) -> None:
        """Refuse times at which no round can be made."""
        check_integer("every", self.every, at_least=1)
        for name, least, most in (("delay", 0, self.every - 1), ("fragments", 1, self.every)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ArgumentError(
                    f"{name} must be an integer from {least} to {most} with every = {self.every}, got "
                    f"{value!r}"
                )
        check_number("mix", self.mix, "in [0, 1]", lambda x: 0 <= x <= 1)

    def sends_at(self, fragment: int, step: int) -> bool:
        """Whether a fragment's update is sent after so many steps."""
        return step > 0 and (step - self._offset(fragment)) % self.every == 0

    def receives_at(self, fragment: int, step: int) -> bool:
        """Whether what a fragment has sent is applied after so many steps."""
        return self.sends_at(fragment, step - self.delay)

    def _offset(self, fragment: int) -> int:
        return (fragment + 1) * self.every // self.fragments


GRADIENTS = Rounds()
