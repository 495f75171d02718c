"""The paper's two-worker logistic regression (Section 1.2), shared by its two examples.

    x_1 = (100, 1), x_2 = (-100, 1), both labelled 1, w_n = 1/2, start at w = (0, 1)
    F_n(w) = log(1 + exp(-<w, x_n>)),   grad F_n = -x_n / (1 + exp(<w, x_n>))

The first entries are large and cancel; all there is to learn is in the second.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regtopk.algorithms import Dense, RegTopK, TopK
from regtopk.core.algorithm import Algorithm
from regtopk.simulate import Cluster

POINTS = ((100.0, 1.0), (-100.0, 1.0))
START = (0.0, 1.0)


def methods(mu: float) -> dict[str, Algorithm[Any]]:
    """The four methods compared on it, sending one of two entries."""
    return {
        "dense": Dense(),
        "topk": TopK(k=1),
        "regtopk": RegTopK(k=1, mu=mu, reference="previous"),
        "regtopk-current": RegTopK(k=1, mu=mu, reference="current"),
    }


def risk(w: Tensor) -> Tensor:
    """F(w), the mean of the F_n."""
    return torch.log1p(torch.exp(-(_points(w) @ w))).mean()


def grads(w: Tensor) -> Tensor:
    """The workers' gradients, (2, 2)."""
    points = _points(w)
    return -points * torch.sigmoid(-(points @ w)).unsqueeze(-1)


def descend(
    algorithm: Algorithm[Any],
    gradients: Callable[[Tensor], Tensor],
    *,
    lr: float,
    num_iterations: int,
    device: str,
) -> Iterator[tuple[Tensor, Tensor]]:
    """w^{t+1} = w^t - lr g^t: yields w^t and the step lr g^t that is taken from it."""
    cluster = Cluster(algorithm, num_workers=len(POINTS))
    w = torch.tensor(START, dtype=torch.float64, device=device)
    for _ in range(num_iterations):
        step = lr * cluster.step(gradients(w))
        yield w, step
        w = w - step


def _points(w: Tensor) -> Tensor:
    return torch.tensor(POINTS, dtype=w.dtype, device=w.device)
