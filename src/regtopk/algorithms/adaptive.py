"""Adaptive density: any algorithm's k, moved during training towards a byte budget or a target error."""

import math
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from regtopk.algorithms.regtopk import RegTopK
from regtopk.core import Algorithm, Conversation, WithDensity, Worker, exact_sum, integer, option, within
from regtopk.core.requests import DenseSum, Request
from regtopk.core.state import State, extended, per_worker, shared
from regtopk.core.traffic import payload_bytes
from regtopk.errors import ArgumentError

DEFAULT_TARGET_ERROR = 0.9
_LARGEST_FACTOR = 2.0  # by which one adaptation may change the density
_PART_OF_DEBT = 0.1  # that is paid back until the next adaptation
_RULES = {"density": shared(), "spent": per_worker("reset"), "debt": shared()}


@dataclass(frozen=True, kw_only=True)
class AdaptiveDensity(Algorithm[State]):
    """Adapts the density of another algorithm while it trains.

    bytes_per_step   B = sum_n w_n (mean payload of worker n since the last adaptation)
                     debt := debt + B - budget
                     density := density · (budget - debt / 10) / B, the dividend within 1/2..2 budgets
    target_error     E = sum_n w_n ||a_n - sent_n||^2 / ||a_n||^2 of this step,   a_n = e_n + g_n
                     density := density · sqrt(E / (1 - E) · (1 - target) / target)

    Every few steps, after the algorithm's own conversation, the workers share B or E. The density changes by
    a factor of at most 2. It depends on received values alone, so it is the same on all ranks. On a cluster
    that splits sparse sums by region, the budget counts the messages of an all_gather all the same.

    Use it for: holding a byte budget or an error without knowing the density.

    Args:
        algorithm: any algorithm with a density, a number, or a k to start from. For a target_error it must
            keep in its residual all that it does not send.
        target_error: the share of ||a_n||^2 that may stay in the residual, in (0, 1); 0.9 if no aim is given.
        bytes_per_step: mean payload per worker and step over the whole training, > 0.
        min_density, max_density: the bounds of k / J, in (0, 1].
        every: steps from one adaptation to the next, >= 1.

    The rule is our own; the paper leaves it open.
    """

    name = "adaptive"
    promises = frozenset()
    algorithm: WithDensity[Any] = field(default_factory=lambda: RegTopK(density=0.01))
    target_error: float | None = option(None, within("(0, 1)"))
    bytes_per_step: float | None = option(None, within("(0, inf)"))
    min_density: float = option(1e-5, within("(0, 1]"))
    max_density: float = option(1.0, within("(0, 1]"))
    every: int = option(10, integer(at_least=1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_error is not None and self.bytes_per_step is not None:
            raise ArgumentError(
                f"give at most one of target_error and bytes_per_step, got {self.target_error}, "
                f"{self.bytes_per_step}"
            )
        if self.min_density > self.max_density:
            raise ArgumentError(
                f"min_density must be at most max_density, got {self.min_density} > {self.max_density}"
            )
        algorithm = self.algorithm
        if not isinstance(algorithm, WithDensity) or algorithm.listens:
            raise ArgumentError(f"algorithm must have a density and not adapt it itself, got {algorithm!r}")
        if callable(algorithm.density) or algorithm.density is algorithm.k is None:
            raise ArgumentError(f"algorithm must have a density that is a number, or a k, got {algorithm!r}")
        if self.bytes_per_step is None and "conserves" not in algorithm.promises:
            raise ArgumentError(
                "algorithm must keep all that it does not send in its residual, for a target_error to be "
                f"measured (give bytes_per_step instead), got {algorithm!r}"
            )

    def init(self, worker: Worker) -> State:
        inner: State = self.algorithm.init(worker)
        density = self.algorithm.num_selected(worker) / worker.numel
        more = {"density": worker.weight.new_tensor(self._within_bounds(density))}
        if self.bytes_per_step is not None:
            more["spent"] = worker.zeros(1, dtype=torch.int64)
            more["debt"] = worker.weight.new_zeros(())
        return extended(inner, _RULES, **more)

    def exchange(self, grad: Tensor, state: State, worker: Worker) -> Conversation:
        adaptive: Any = state  # with the fields that `init` adds
        algorithm = replace(self.algorithm, density=float(adaptive.density), k=None)
        conversation = algorithm.exchange(grad, state, worker)
        is_due = (worker.step + 1) % self.every == 0
        if self.bytes_per_step is not None:
            keeping = self._keep_to_budget(conversation, adaptive, worker, self.bytes_per_step, is_due)
        else:
            keeping = self._keep_to_error(conversation, grad, adaptive, worker, is_due)
        aggregate, factor = yield from keeping
        factor = min(_LARGEST_FACTOR, max(1 / _LARGEST_FACTOR, factor))
        adaptive.density.fill_(self._within_bounds(float(adaptive.density) * factor))
        return aggregate

    def _keep_to_budget(
        self, conversation: Conversation, state: Any, worker: Worker, budget: float, is_due: bool
    ) -> Generator[Request, Any, tuple[Tensor, float]]:
        """The aggregate, and the factor of the density; counts the bytes of every step."""
        aggregate, payload = yield from _counted(conversation, worker)
        state.spent += payload.unsqueeze(-1)
        if not is_due:
            return aggregate, 1.0
        request = DenseSum(state.spent.to(worker.weight.dtype) / self.every, worker.weight)
        mean_bytes = yield from request
        own_bytes = float(payload_bytes(request, worker).max()) / self.every
        spent = float(mean_bytes) + own_bytes
        state.spent.zero_()
        state.debt += spent - budget
        aim = min(2 * budget, max(budget / 2, budget - _PART_OF_DEBT * float(state.debt)))
        return aggregate, aim / spent

    def _keep_to_error(
        self, conversation: Conversation, grad: Tensor, state: Any, worker: Worker, is_due: bool
    ) -> Generator[Request, Any, tuple[Tensor, float]]:
        """The aggregate, and the factor of the density; measures the error where an adaptation is due."""
        if not is_due:
            return (yield from conversation), 1.0
        target = DEFAULT_TARGET_ERROR if self.target_error is None else self.target_error
        accumulated = exact_sum((state.residual + grad).double().square())
        aggregate = yield from conversation
        error = exact_sum(state.residual.double().square()) / accumulated
        error = error.where(accumulated > 0, target)  # a zero vector says nothing about the density
        mean_error = yield from DenseSum(error.to(worker.weight.dtype).unsqueeze(-1), worker.weight)
        return aggregate, math.sqrt(_odds(float(mean_error)) / _odds(target))

    def _within_bounds(self, density: float) -> float:
        return min(self.max_density, max(self.min_density, density))


def _counted(conversation: Conversation, worker: Worker) -> Generator[Request, Any, tuple[Tensor, Tensor]]:
    """Run a conversation to its end, and count the payload of each worker, (...,)."""
    payload = torch.zeros_like(worker.index.squeeze(-1))
    try:
        request = next(conversation)
        while True:
            payload = payload + payload_bytes(request, worker)
            request = conversation.send((yield request))
    except StopIteration as done:
        return done.value, payload


def _odds(error: float) -> float:
    """error / (1 - error), kept finite and above zero."""
    stays = min(max(error, 1e-12), 1 - 1e-12)
    return stays / (1 - stays)
