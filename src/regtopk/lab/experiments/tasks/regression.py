"""Linear regression on workers that disagree (Section 4.1).

    X_n iid N(0, 1), (D, J);  t_n iid N(u_n, 1), u_n ~ N(0, 5);  y_n = X_n t_n + N(0, 0.5)
    F_n(w) = ||X_n w - y_n||^2 / (2 D),   w_n = 1/N,   full batches, w^0 = 0

The gradients X_n^T (X_n w - y_n) / D = A_n w - b_n of all models of all seeds are one product.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regtopk.core.worker import Layout
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.tasks.task import Task, TaskSettings

MEAN_VARIANCE, NOISE_VARIANCE = 5.0, 0.5


@dataclass(frozen=True)
class Regressions:
    """The regressions of R seeds: A_n = X_n^T X_n / D, b_n = X_n^T y_n / D, and the minimiser w*."""

    gram: Tensor  # (R, J, N J): the A_n side by side
    moment: Tensor  # (R, N, J): the b_n
    optimum: Tensor  # (R, J)

    def grads(self, models: Tensor) -> Tensor:
        """A_n w - b_n for M models of each seed: (R, M, J) in, (R, M, N, J) out."""
        grads = (models @ self.gram).view(*models.shape[:2], *self.moment.shape[1:])
        return grads.sub_(self.moment.unsqueeze(1))

    def distances(self, models: Tensor) -> Tensor:
        """||w - w*|| for M models of each seed: (R, M, J) in, (R, M) out."""
        found: Tensor = torch.linalg.vector_norm(models - self.optimum.unsqueeze(1), dim=-1)
        return found


def draw_regressions(
    seeds: Sequence[int],
    *,
    num_workers: int = 20,
    numel: int = 100,
    num_points: int = 500,
    device: str = "cpu",
) -> Regressions:
    """Draw the data of every seed, on the CPU in float64, so that a seed means the same everywhere."""
    drawn = zip(*(_draw(seed, num_workers, num_points, numel) for seed in seeds), strict=True)
    gram, moment = (torch.stack(parts).to(device) for parts in drawn)
    optimum = torch.linalg.solve(gram.mean(1), moment.mean(1))
    return Regressions(gram.transpose(1, 2).flatten(2), moment, optimum)  # A_n is symmetric


def _draw(seed: int, num_workers: int, num_points: int, numel: int) -> tuple[Tensor, Tensor]:
    """A_n and b_n."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, variance: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * math.sqrt(variance)

    points = normal(num_workers, num_points, numel)
    means = normal(num_workers, 1, variance=MEAN_VARIANCE)
    truths = means + normal(num_workers, numel)
    labels = torch.einsum("ndj,nj->nd", points, truths)
    labels = labels + normal(*labels.shape, variance=NOISE_VARIANCE)
    gram = torch.einsum("ndi,ndj->nij", points, points) / num_points
    return gram, torch.einsum("ndj,nd->nj", points, labels) / num_points


class LinearRegression(Task):
    """Figure 2's regression: the distance from the optimum."""

    metric = "distance"
    is_better_higher = False
    has_log_axis = True
    defaults: ClassVar = dict(num_workers=20, num_steps=2500, batch_size=500, lr=(0.01,))

    def __init__(self, config: TaskSettings, seeds: Sequence[int], examples: Any = None) -> None:
        super().__init__(config, seeds)
        if config.split != "iid":
            raise ArgumentError(
                f"split must be iid for linreg, whose workers differ anyway, got {config.split!r}"
            )
        self.problems = draw_regressions(
            seeds, num_workers=config.num_workers, num_points=config.batch_size, device=config.device
        )
        self.layout = Layout.anonymous(self.problems.optimum.shape[-1])
        self.weights = [[1 / config.num_workers] * config.num_workers] * len(self.seeds)

    def start(self) -> Tensor:
        """From zero, in float64."""
        return torch.zeros_like(self.problems.optimum)

    def grads(self, models: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Full batches: A_n w - b_n."""
        grads = self.problems.grads(models.unsqueeze(1)).squeeze(1)
        return grads, self.problems.distances(models.unsqueeze(1)).squeeze(1)

    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """||w - w*||."""
        distances = self.problems.distances(models.unsqueeze(1)).squeeze(1)
        return [{self.metric: distance} for distance in distances.tolist()]
