"""Models of several seeds trained by one method, side by side where the method allows it."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regtopk.core.algorithm import Algorithm
from regtopk.core.link import Link
from regtopk.experiments.tasks import Task
from regtopk.simulate import Cluster

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
}


LINK = Link(bandwidth=100e6, latency_s=1e-3, compute_s=20e-3)  # what methods that adapt to time are told


class Fleet:
    """R models, (R, J), their optimizer, and the clusters that aggregate their gradients.

    A seed whose loss or model is not finite any more has diverged: it keeps its last finite model, and the
    others go on.

    Args:
        task: gives gradients and judges models.
        algorithm: run by every seed's workers.
        optimizer: one of `OPTIMIZERS`.
        lr: learning step length.
        index_code: how indices are counted.
    """

    def __init__(
        self, task: Task, algorithm: Algorithm[Any], *, optimizer: str, lr: float, index_code: str
    ) -> None:
        self.task = task
        self.models = task.start()
        self.num_steps = 0
        self.losses = task.grads(self.models, 0)[1].tolist()
        is_alike = all(weights == task.weights[0] for weights in task.weights)
        is_batch = is_alike and "replicates" in algorithm.promises
        self.clusters = [
            Cluster(
                algorithm,
                num_workers=task.config.num_workers,
                weights=weights,
                layout=task.layout,
                index_code=index_code,
                link=LINK,
            )
            for weights in (task.weights[:1] if is_batch else task.weights)
        ]
        self._optimizer = OPTIMIZERS[optimizer]([self.models], lr=lr)
        self._seen: list[float] = []
        self._is_diverged = torch.zeros(len(task.seeds), dtype=torch.bool, device=self.models.device)

    def run_until(self, step: int) -> None:
        """Train up to a step."""
        while self.num_steps < step:
            self._step()

    def evaluate(self) -> list[float]:
        """How good each seed's model is; of a seed that diverged, how good it was when last seen well."""
        now = self.task.evaluate(self.models)
        is_lost = torch.tensor([not math.isfinite(value) for value in now], device=self.models.device)
        self._is_diverged |= is_lost
        lost = self._is_diverged.tolist()
        self._seen = [old if bad else new for old, new, bad in zip(self._seen or now, now, lost, strict=True)]
        return self._seen

    @property
    def payload_bytes(self) -> float:
        """What a worker has contributed so far, on average over workers and seeds."""
        return float(torch.stack([c.total.payload_bytes.double().mean() for c in self.clusters]).mean())

    @property
    def diverged(self) -> list[int]:
        """Seeds that diverged."""
        return [
            seed for seed, is_lost in zip(self.task.seeds, self._is_diverged.tolist(), strict=True) if is_lost
        ]

    def _step(self) -> None:
        grads, losses = self.task.grads(self.models, self.num_steps)
        self._is_diverged |= ~torch.isfinite(losses) | ~torch.isfinite(grads.sum((1, 2)))
        grads = grads.where(~self._is_diverged[:, None, None], 0.0)
        before = self.models.clone()
        self.models.grad = self._aggregate(grads)
        self._report(losses)
        self._optimizer.step()
        self._is_diverged |= ~torch.isfinite(self.models.sum(-1))
        self.models.copy_(self.models.where(~self._is_diverged[:, None], before))
        kept = torch.tensor(self.losses, dtype=losses.dtype, device=losses.device)
        self.losses = losses.where(~self._is_diverged, kept).tolist()
        self.num_steps += 1

    def _aggregate(self, grads: Tensor) -> Tensor:
        if len(self.clusters) == 1:
            return self.clusters[0].step(grads if len(grads) > 1 else grads[0]).reshape(self.models.shape)
        return torch.stack([cluster.step(g) for cluster, g in zip(self.clusters, grads, strict=True)])

    def _report(self, losses: Tensor) -> None:
        own = [losses.mean()] if len(self.clusters) == 1 else losses
        for cluster, loss in zip(self.clusters, own, strict=True):
            if cluster.algorithm.listens:
                cluster.report(loss=float(loss))
