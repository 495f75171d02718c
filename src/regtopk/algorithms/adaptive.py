"""Adaptive density: any algorithm's k, moved during training towards a byte budget or a target error."""

import math
from collections.abc import Generator
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from regtopk.algorithms.regtopk import RegTopK
from regtopk.core.algorithm import Algorithm, Conversation, Promise, WithDensity
from regtopk.core.exact import exact_sum
from regtopk.core.options import check_integer, check_number
from regtopk.core.payload import payload_bytes
from regtopk.core.requests import DenseSum, Request
from regtopk.core.state import State, shared
from regtopk.core.worker import Worker
from regtopk.errors import ArgumentError

DEFAULT_TARGET_ERROR = 0.9
_LARGEST_FACTOR = 2.0  # that the density may change by at once


@dataclass(frozen=True, kw_only=True)
class AdaptiveDensity(Algorithm[State]):
    """Adapts the density of another algorithm while it trains.

    Every few steps, after the algorithm's own conversation, the workers share one number:

        bytes_per_step   B = sum_n w_n (payload of worker n in this step)
                         density := density · budget / B
        target_error     E = sum_n w_n ||a_n - sent_n||^2 / ||a_n||^2,   a_n = e_n + g_n
                         density := density · sqrt(E / (1 - E) · (1 - target) / target)

    by a factor of at most 2, within min_density..max_density. So the density is the same on all ranks, and a
    function of what they received.

    Args:
        algorithm: any that has a density; the one it has, a number (or its k), is where it starts.
        target_error: share of the squared norm of what a worker has accumulated that may stay behind, in
            (0, 1); needs an algorithm that conserves it in a residual. 0.9 if no budget is given either.
        bytes_per_step: mean payload a worker and step, > 0, this method's own numbers included.
        min_density, max_density: what k / J is kept within, in (0, 1].
        every: steps from one adaptation to the next, >= 1.

    The paper names this as the natural extension of RegTop-k and leaves it open; the rule is our own. On a
    cluster that splits sparse sums by region the budget is that of the messages it would gather otherwise.
    """

    name: ClassVar[str] = "adaptive"
    promises: ClassVar[frozenset[Promise]] = frozenset()
    algorithm: WithDensity[Any] = field(default_factory=lambda: RegTopK(density=0.01))
    target_error: float | None = None
    bytes_per_step: float | None = None
    min_density: float = 1e-5
    max_density: float = 1.0
    every: int = 10

    def __post_init__(self) -> None:
        """Check the options."""
        if self.target_error is not None and self.bytes_per_step is not None:
            raise ArgumentError(
                f"give at most one of target_error and bytes_per_step, got {self.target_error}, "
                f"{self.bytes_per_step}"
            )
        if self.target_error is not None:
            check_number("target_error", self.target_error, "in (0, 1)", lambda x: 0 < x < 1)
        if self.bytes_per_step is not None:
            check_number("bytes_per_step", self.bytes_per_step, "> 0", lambda x: 0 < x < math.inf)
        for name in ("min_density", "max_density"):
            check_number(name, getattr(self, name), "in (0, 1]", lambda x: 0 < x <= 1)
        if self.min_density > self.max_density:
            raise ArgumentError(
                f"min_density must be at most max_density, got {self.min_density} > {self.max_density}"
            )
        check_integer("every", self.every, at_least=1)
        self._check_algorithm()

    def init(self, worker: Worker) -> State:
        """The algorithm's own state, and the density."""
        inner: State = self.algorithm.init(worker)
        density = self.algorithm.num_selected(worker) / worker.numel
        density = min(self.max_density, max(self.min_density, density))
        extended: State = _with_density(type(inner))(
            **inner.state_dict(), density=worker.weight.new_tensor(density)
        )
        return extended

    def exchange(self, grad: Tensor, state: State, worker: Worker) -> Conversation:
        """One step of the algorithm at the density of the moment."""
        adaptive = cast("_WithDensity", state)
        algorithm = replace(self.algorithm, density=float(adaptive.density), k=None)
        conversation = algorithm.exchange(grad, state, worker)
        if (worker.step + 1) % self.every:
            return (yield from conversation)
        if self.bytes_per_step is not None:
            aggregate, payload = yield from _counted(conversation, worker)
            mean = yield _tell(payload, worker)
            own_bytes = payload_bytes(_tell(payload, worker), worker).max() / self.every
            factor = self.bytes_per_step / float(mean + own_bytes)
        else:
            accumulated = _squared_norm(adaptive.residual + grad)
            aggregate = yield from conversation
            error = _squared_norm(adaptive.residual) / accumulated
            mean = yield _tell(error.where(accumulated > 0, self._target), worker)
            factor = math.sqrt(_odds(float(mean)) / _odds(self._target))
        factor = min(_LARGEST_FACTOR, max(1 / _LARGEST_FACTOR, factor))
        density = float(adaptive.density) * factor
        adaptive.density.fill_(min(self.max_density, max(self.min_density, density)))
        return aggregate

    @property
    def _target(self) -> float:
        return DEFAULT_TARGET_ERROR if self.target_error is None else self.target_error

    def _check_algorithm(self) -> None:
        algorithm = self.algorithm
        if not isinstance(algorithm, WithDensity) or algorithm.listens:
            raise ArgumentError(
                f"algorithm must be one that has a density and does not move it itself, got {algorithm!r}"
            )
        if callable(algorithm.density) or (algorithm.density is None and algorithm.k is None):
            raise ArgumentError(
                f"algorithm must have a number as density, or a k, to start from, got {algorithm!r}"
            )
        if self.bytes_per_step is None and "conserves" not in algorithm.promises:
            raise ArgumentError(
                f"target_error needs an algorithm that conserves what it does not send in a residual, got "
                f"{algorithm.name!r}: give bytes_per_step"
            )


class _WithDensity(State):
    """What the adaptation reads and writes of a state."""

    residual: Tensor
    density: Tensor


def _with_density(state_class: type[State]) -> Any:
    """The class of an algorithm's state with one more field."""
    name = f"{state_class.__name__}WithDensity"
    return make_dataclass(name, [("density", Tensor, shared())], bases=(state_class,))


def _counted(conversation: Conversation, worker: Worker) -> Generator[Request, Any, tuple[Tensor, Tensor]]:
    """Lead a conversation to its end, and count what the workers contribute to it, (...,)."""
    payload = torch.zeros_like(worker.index.squeeze(-1))
    try:
        request = next(conversation)
        while True:
            payload = payload + payload_bytes(request, worker)
            request = conversation.send((yield request))
    except StopIteration as done:
        return done.value, payload


def _tell(number: Tensor, worker: Worker) -> DenseSum:
    """The workers' mean of a number, (...,), as a request."""
    return DenseSum(number.to(worker.weight.dtype).unsqueeze(-1), worker.weight)


def _squared_norm(x: Tensor) -> Tensor:
    return exact_sum(x.double().square())


def _odds(error: float) -> float:
    """What stays for what goes, finite and not zero."""
    stays = min(max(error, 1e-12), 1 - 1e-12)
    return stays / (1 - stays)
