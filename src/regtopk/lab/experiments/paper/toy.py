"""The paper's two workers that cancel, trained by every method: shared by its two examples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regtopk.algorithms import Dense, RegTopK, TopK
from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_options, integer, option, within
from regtopk.lab.experiments.experiment import ShowProgress
from regtopk.lab.experiments.settings import check_device
from regtopk.lab.experiments.tasks.toy import POINTS, START
from regtopk.simulate import Cluster


@dataclass(frozen=True)
class ToyConfig:
    """Settings of an experiment on the toy problem.

    Args:
        num_iterations: T; the paper shows 100.
        lr: learning rate.
        mu: RegTop-k's; in Figure 1 every mu gives the same curve.
        w_1: where the first entry starts; 0 in the paper, and off 0 a lr of 0.9 is too large for dense too.
        device: cpu or cuda.
    """

    num_iterations: int = option(100, integer(at_least=1))
    lr: float = option(0.9, within("(0, inf)"))
    mu: float = option(1.0, within("(0, inf)"))
    w_1: float = option(0.0, within("(-inf, inf)"))
    device: str = option("cpu", check_device)

    def __post_init__(self) -> None:
        """Check the settings."""
        check_options(self)


def start(config: ToyConfig) -> Tensor:
    """w^0."""
    return torch.tensor((config.w_1, START[1]), dtype=torch.float64, device=config.device)


def descend(
    config: ToyConfig, gradients: Callable[[Tensor], Tensor], num_iterations: int, progress: ShowProgress
) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """w^{t+1} = w^t - lr g^t by every method: yields its name, t, w^t and the step lr g^t taken from it."""
    algorithms: dict[str, Algorithm[Any]] = {
        "dense": Dense(),
        "topk": TopK(k=1),
        "regtopk": RegTopK(k=1, mu=config.mu, reference="previous"),
        "regtopk-cap": RegTopK(k=1, mu=config.mu, damping="cap"),
        "regtopk-current": RegTopK(k=1, mu=config.mu, reference="current"),
    }
    for done, (method, algorithm) in enumerate(algorithms.items(), start=1):
        cluster = Cluster(algorithm, num_workers=len(POINTS))
        w = start(config)
        for iteration in range(num_iterations):
            step = config.lr * cluster.step(gradients(w))
            yield method, iteration, w, step
            w = w - step
        progress(done / len(algorithms))
