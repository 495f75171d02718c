"""The paper's small problems: two workers that cancel (Section 1.2), and regressions that disagree (4.1).

Figures 1 and 2 show them; as tasks of `compare` any method can be tried on them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regtopk.core.worker import Layout
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data.examples import NO_EXAMPLES, Examples
from regtopk.lab.experiments.tasks.task import Task, TaskSettings

POINTS = ((100.0, 1.0), (-100.0, 1.0))
MEAN_VARIANCE, NOISE_VARIANCE = 5.0, 0.5


def risk(w: Tensor) -> Tensor:
    """F(w), the mean of the F_n."""
    x = -(w.new_tensor(POINTS) @ w)
    return (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))).mean()  # log(1 + exp x), but exp may overflow


def grads(w: Tensor) -> Tensor:
    """The workers' gradients, (2, 2)."""
    points = w.new_tensor(POINTS)
    return -points * torch.sigmoid(-(points @ w)).unsqueeze(-1)


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
    seeds: Sequence[int], num_workers: int = 20, numel: int = 100, num_points: int = 500, device: str = "cpu"
) -> Regressions:
    """Draw the data of every seed, on the CPU in float64, so that a seed means the same everywhere."""
    drawn = zip(*(_draw(seed, num_workers, numel, num_points) for seed in seeds), strict=True)
    gram, moment = (torch.stack(parts).to(device) for parts in drawn)
    optimum = torch.linalg.solve(gram.mean(1), moment.mean(1))
    return Regressions(gram.transpose(1, 2).flatten(2), moment, optimum)  # A_n is symmetric


def _draw(seed: int, num_workers: int, numel: int, num_points: int) -> tuple[Tensor, Tensor]:
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


class ConvexTask(Task):
    """A problem without examples or a network: workers' gradients and a distance are formulas."""

    is_better_higher = False

    def __init__(self, config: TaskSettings, seeds: Sequence[int], start: Tensor) -> None:
        super().__init__(config, seeds, NO_EXAMPLES)
        self.weights = [[1 / config.num_workers] * config.num_workers] * len(seeds)
        self._start, self.layout = start.to(config.device), Layout.anonymous(start.shape[-1])

    @classmethod
    def check(cls, config: TaskSettings) -> None:
        """Refuse settings that the task does not have."""
        super().check(config)
        if config.split != "iid":
            raise ArgumentError(f"split must be iid for {config.task}, got {config.split!r}")

    @classmethod
    def load(cls, config: TaskSettings) -> Examples:
        """Nothing: the problem is drawn by its seed."""
        return NO_EXAMPLES

    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """The metric of each model."""
        return [{self.metric: value} for value in self.grads(models, 0)[1].tolist()]


class Toy(ConvexTask):
    """Two workers whose large entries cancel: the risk. Nothing is drawn, so all seeds are alike."""

    metric = "risk"
    defaults: ClassVar = dict(num_workers=2, num_steps=100, batch_size=1, lr=(0.9,))

    def __init__(self, config: TaskSettings, seeds: Sequence[int], _: Examples) -> None:
        super().__init__(config, seeds, torch.tensor([[0.0, 1.0]] * len(seeds), dtype=torch.float64))

    @classmethod
    def check(cls, config: TaskSettings) -> None:
        """Refuse settings that the task does not have."""
        super().check(config)
        if config.num_workers != len(POINTS):
            raise ArgumentError(f"num_workers must be {len(POINTS)} for toy, got {config.num_workers}")

    def grads(self, models: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Of the logistic loss."""
        return torch.stack([grads(model) for model in models]), torch.stack([risk(model) for model in models])


class LinearRegression(ConvexTask):
    """Figure 2's regression, in full batches: the distance from the optimum."""

    metric = "distance"
    defaults: ClassVar = dict(num_workers=20, num_steps=2500, batch_size=500, lr=(0.01,))

    def __init__(self, config: TaskSettings, seeds: Sequence[int], _: Examples) -> None:
        sizes = {"num_workers": config.num_workers, "num_points": config.batch_size}
        self.problems = draw_regressions(seeds, **sizes, device=config.device)
        super().__init__(config, seeds, torch.zeros_like(self.problems.optimum))

    def grads(self, models: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """A_n w - b_n, and ||w - w*||."""
        own = models.unsqueeze(1)
        return self.problems.grads(own).squeeze(1), self.problems.distances(own).squeeze(1)
