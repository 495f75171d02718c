"""What methods are compared on: gradients of N simulated workers, and numbers that say how good a model is.

A model is a flat vector. R seeds are R rows, and all workers of all seeds give their gradients in one call.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from regtopk.core.worker import Layout

Quality = dict[str, float | None]  # by the name of what was measured, such as "accuracy"


class Task(ABC):
    """A problem, for some seeds.

    Attributes:
        seeds: R of them.
        num_workers: N.
        layout: which parameter owns which entries.
        weights: w_n for each seed; None where all workers weigh the same.
    """

    is_loss_averaged: ClassVar[bool] = False  # whether a record has the mean loss since the record before
    has_own_models: ClassVar[bool] = False  # whether `grads` also takes a model for every worker
    seeds: Sequence[int]
    num_workers: int
    layout: Layout
    weights: Sequence[list[float] | None]

    @abstractmethod
    def start(self) -> Tensor:
        """The first models, (R, J)."""

    @abstractmethod
    def grads(self, models: Tensor, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """What the workers send, (R, N, J), and their mean loss (R,); the next call may overwrite both.

        Args:
            models: (R, J), or (R, N, J) for a task whose workers may have their own.
            step: which mini-batches.
            lr: learning rate, of tasks whose workers take local steps.
        """

    @abstractmethod
    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """How good each model is."""

    def outer_lr(self, lr: float) -> float:
        """The learning rate that the aggregate is applied with."""
        return lr


class Problem(ABC):
    """What the tasks of a comparison share, such as the data.

    Attributes:
        numel: J.
    """

    numel: int

    def __init__(self) -> None:
        self._tasks: dict[tuple[int, ...], Task] = {}

    def task(self, seeds: Sequence[int]) -> Task:
        """The task of some seeds, made once."""
        key = tuple(seeds)
        if key not in self._tasks:
            self._tasks[key] = self.make_task(seeds)
        return self._tasks[key]

    @abstractmethod
    def make_task(self, seeds: Sequence[int]) -> Task:
        """Make the task of some seeds."""

    def probe(self) -> Task:
        """The task that payloads are measured on: the same for all slices."""
        return self.task([0])

    @property
    def contents(self) -> dict[str, str]:
        """What tells its data from others of the same name."""
        return {}
