"""The paper's two-worker logistic regression (Section 1.2).

    x_1 = (100, 1), x_2 = (-100, 1), both labelled 1, w_n = 1/2, start at w = (0, 1)
    F_n(w) = log(1 + exp(-<w, x_n>)),   grad F_n = -x_n / (1 + exp(<w, x_n>))

The first entries are large and cancel; all there is to learn is in the second.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from regtopk.core.worker import Layout
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.tasks.task import Task, TaskSettings

POINTS = ((100.0, 1.0), (-100.0, 1.0))
START = (0.0, 1.0)


def risk(w: Tensor) -> Tensor:
    """F(w), the mean of the F_n."""
    x = -(_points(w) @ w)
    return (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))).mean()  # log(1 + exp x), but exp may overflow


def grads(w: Tensor) -> Tensor:
    """The workers' gradients, (2, 2)."""
    points = _points(w)
    return -points * torch.sigmoid(-(points @ w)).unsqueeze(-1)


def _points(w: Tensor) -> Tensor:
    return torch.tensor(POINTS, dtype=w.dtype, device=w.device)


class Toy(Task):
    """Two workers whose large entries cancel: the risk."""

    metric = "risk"
    is_better_higher = False
    has_log_axis = True
    defaults: ClassVar = dict(num_workers=2, num_steps=100, batch_size=1, lr=(0.9,))

    def __init__(self, config: TaskSettings, seeds: Sequence[int], examples: Any = None) -> None:
        super().__init__(config, seeds)
        if (config.num_workers, config.split) != (len(POINTS), "iid"):
            raise ArgumentError(
                f"toy has {len(POINTS)} workers and no split, got num_workers={config.num_workers}, "
                f"split={config.split!r}"
            )
        self.layout = Layout.anonymous(len(START))
        self.weights = [[0.5, 0.5]] * len(self.seeds)

    def start(self) -> Tensor:
        """The paper's start, in float64; nothing is drawn, so all seeds are alike."""
        start = torch.tensor(START, dtype=torch.float64, device=self.config.device)
        return start.repeat(len(self.seeds), 1)

    def grads(self, models: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Of the logistic loss."""
        return torch.stack([grads(model) for model in models]), self._risk(models)

    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """F(w)."""
        return [{self.metric: risk} for risk in self._risk(models).tolist()]

    def _risk(self, models: Tensor) -> Tensor:
        return torch.stack([risk(model) for model in models])
