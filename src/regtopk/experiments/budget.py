"""Which density makes a method send a given number of bytes: found by asking the method itself."""

import math
from collections.abc import Callable
from typing import Any

from regtopk.core.algorithm import Algorithm
from regtopk.errors import ArgumentError
from regtopk.experiments.tasks import Task
from regtopk.simulate import Cluster

NUM_STEPS = 4
TOLERANCE = 0.005  # of the density's logarithm


class Probe:
    """A few steps' gradients of a task's first seed, to measure what a method sends."""

    def __init__(self, task: Task) -> None:
        self.task = task
        models = task.start()
        self.grads = [task.grads(models, step)[0][0] for step in range(NUM_STEPS)]

    def payload(self, algorithm: Algorithm[Any], index_code: str) -> float:
        """Mean payload of a worker and step."""
        cluster = Cluster(
            algorithm,
            num_workers=self.task.config.num_workers,
            weights=self.task.weights[0],
            layout=self.task.layout,
            index_code=index_code,
        )
        for grads in self.grads:
            cluster.step(grads)
        return float(cluster.total.payload_bytes.double().mean()) / NUM_STEPS

    def find_density(
        self, make: Callable[[float], Algorithm[Any]], index_code: str, budget: float, *, name: str
    ) -> float:
        """The largest density whose payload is within the budget, by bisection of its logarithm.

        Raises:
            ArgumentError: a single entry already takes more.
        """
        low, high = math.log(1 / self.task.layout.numel), 0.0
        smallest = self.payload(make(math.exp(low)), index_code)
        if smallest > budget:
            raise ArgumentError(
                f"bytes_per_step must be at least the smallest message of {name}, {smallest:.0f}, "
                f"got {budget:.0f}"
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
