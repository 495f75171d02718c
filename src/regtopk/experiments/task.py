"""What methods are compared on: gradients of N simulated workers, and numbers that say how good a model is.

A model is a flat vector; R seeds are R rows, and all workers of all seeds give their gradients in one call.
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
            models: (R, J).
            step: which mini-batches.
            lr: learning rate, of tasks whose workers take local steps.
        """

    @abstractmethod
    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """How good each model is."""

    def outer_lr(self, lr: float) -> float:
        """The learning rate that the aggregate is applied with."""
        return lr
