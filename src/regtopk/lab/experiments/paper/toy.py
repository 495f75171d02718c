"""The paper's two-worker logistic regression (Section 1.2), shared by its two examples.

    x_1 = (100, 1), x_2 = (-100, 1), both labelled 1, w_n = 1/2, start at w = (0, 1)
    F_n(w) = log(1 + exp(-<w, x_n>)),   grad F_n = -x_n / (1 + exp(<w, x_n>))

The first entries are large and cancel; all there is to learn is in the second.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regtopk.algorithms import Dense, RegTopK, TopK
from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_integer, check_number, check_positive
from regtopk.lab.experiments.experiment import Progress
from regtopk.lab.experiments.settings import check_device
from regtopk.simulate import Cluster

POINTS = ((100.0, 1.0), (-100.0, 1.0))
START = (0.0, 1.0)


@dataclass(frozen=True)
class ToyConfig:
    """Settings of an experiment on the toy problem.

    Args:
        num_iterations: T; the paper shows 100.
        lr: learning rate, > 0.
        mu: RegTop-k's, > 0; in Figure 1 every mu gives the same curve.
        w_1: where the first entry starts; 0 in the paper, and off 0 a lr of 0.9 is too large for dense too.
        device: cpu or cuda.
    """

    num_iterations: int = 100
    lr: float = 0.9
    mu: float = 1.0
    w_1: float = 0.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_integer("num_iterations", self.num_iterations, at_least=1)
        check_positive("lr", self.lr)
        check_positive("mu", self.mu)
        check_number("w_1", self.w_1, "finite", math.isfinite)
        check_device(self.device)


def start(config: ToyConfig) -> Tensor:
    """w^0."""
    return torch.tensor((config.w_1, START[1]), dtype=torch.float64, device=config.device)


def methods(mu: float) -> dict[str, Algorithm[Any]]:
    """The methods compared on it, sending one of two entries."""
    return {
        "dense": Dense(),
        "topk": TopK(k=1),
        "regtopk": RegTopK(k=1, mu=mu, reference="previous"),
        "regtopk-cap": RegTopK(k=1, mu=mu, damping="cap"),
        "regtopk-current": RegTopK(k=1, mu=mu, reference="current"),
    }


def risk(w: Tensor) -> Tensor:
    """F(w), the mean of the F_n."""
    x = -(_points(w) @ w)
    return (x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))).mean()  # log(1 + exp x), but exp may overflow


def grads(w: Tensor) -> Tensor:
    """The workers' gradients, (2, 2)."""
    points = _points(w)
    return -points * torch.sigmoid(-(points @ w)).unsqueeze(-1)


def descend(
    config: ToyConfig, gradients: Callable[[Tensor], Tensor], num_iterations: int, progress: Progress
) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """w^{t+1} = w^t - lr g^t by every method: yields its name, t, w^t and the step lr g^t taken from it."""
    algorithms = methods(config.mu)
    for done, (method, algorithm) in enumerate(algorithms.items(), start=1):
        cluster = Cluster(algorithm, num_workers=len(POINTS))
        w = start(config)
        for iteration in range(num_iterations):
            step = config.lr * cluster.step(gradients(w))
            yield method, iteration, w, step
            w = w - step
        progress(done / len(algorithms))


def _points(w: Tensor) -> Tensor:
    return torch.tensor(POINTS, dtype=w.dtype, device=w.device)
