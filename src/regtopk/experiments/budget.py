"""Which density makes a method send a given number of bytes: found by asking the method itself."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from regtopk.core.algorithm import Algorithm
from regtopk.core.worker import Layout
from regtopk.errors import ArgumentError
from regtopk.experiments.tasks import Task
from regtopk.simulate import Cluster

NUM_STEPS = 4
TOLERANCE = 0.005  # of the density's logarithm


class Probe:
    """A few steps' gradients, to measure what a method sends.

    Args:
        grads: (N, J) of each step.
        weights: w_n.
        layout: which parameter owns which entries.
    """

    def __init__(self, grads: Sequence[Tensor], weights: Sequence[float] | None, layout: Layout) -> None:
        self.grads = grads
        self.weights = weights
        self.layout = layout

    @classmethod
    def of_task(cls, task: Task) -> "Probe":
        """From the first steps of a task's first seed, at its first model."""
        models = task.start()
        grads = [task.grads(models, step)[0][0] for step in range(NUM_STEPS)]
        return cls(grads, task.weights[0], task.layout)

    def payload(self, algorithm: Algorithm[Any], index_code: str) -> float:
        """Mean payload of a worker and step."""
        cluster = Cluster(
            algorithm,
            num_workers=len(self.grads[0]),
            weights=self.weights,
            layout=self.layout,
            index_code=index_code,
        )
        for grads in self.grads:
            cluster.step(grads)
        return float(cluster.total.payload_bytes.double().mean()) / len(self.grads)

    def find_density(
        self, make: Callable[[float], Algorithm[Any]], index_code: str, budget: float, *, name: str
    ) -> float:
        """The largest density whose payload is within the budget, by bisection of its logarithm.

        Raises:
            ArgumentError: a single entry already takes more.
        """
        low, high = math.log(1 / self.layout.numel), 0.0
        smallest = self.payload(make(math.exp(low)), index_code)
        if smallest > budget:
            raise ArgumentError(
                f"the budget of bytes a step must be at least the smallest message of {name}, "
                f"{smallest:.0f}, got {budget:.0f}"
            )
        if self.payload(make(1.0), index_code) <= budget:
            return 1.0
        while high - low > TOLERANCE:
            middle = (low + high) / 2
            if self.payload(make(math.exp(middle)), index_code) <= budget:
                low = middle
            else:
                high = middle
        return math.exp(low)
