"""Which density makes a method send a given number of bytes: the method is run to find out."""

import math
from collections.abc import Sequence
from typing import Any

from regtopk.core.algorithm import Algorithm
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.config import CompareConfig, MethodAt
from regtopk.lab.experiments.tasks import Problem, Task
from regtopk.lab.method import Method
from regtopk.simulate import Cluster

NUM_STEPS = 4
TOLERANCE = 0.005  # of the density's logarithm


class PayloadProbe:
    """The gradients of a task's first steps, to measure what a method sends.

    Args:
        task: its first seed is used, at its first model.
        num_steps: of how many steps; a task has no more batches than steps.
    """

    def __init__(self, task: Task, num_steps: int = NUM_STEPS) -> None:
        models = task.start()
        self.grads = [task.grads(models, step)[0][0].clone() for step in range(num_steps)]
        self.weights = task.weights[0]
        self.layout = task.layout

    def payload(self, algorithm: Algorithm[Any], index_code: str) -> float:
        """Mean payload per worker and step."""
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

    def payload_of(self, config: CompareConfig, method: Method, density: float | None) -> float:
        """What a method sends at a density."""
        return self.payload(config.build(MethodAt(method, density)), config.index_code_of(method))

    def find_density(self, config: CompareConfig, method: Method, budget: float) -> float:
        """The largest density whose payload is within the budget, by bisection of its logarithm.

        Raises:
            ArgumentError: a message of one entry already takes more.
        """
        low, high = math.log(1 / self.layout.numel), 0.0
        smallest = self.payload_of(config, method, math.exp(low))
        if smallest > budget:
            raise ArgumentError(
                f"the budget of bytes per step must be at least the smallest message of {method.label}, "
                f"{smallest:.0f}, got {budget:.0f}"
            )
        if self.payload_of(config, method, 1.0) <= budget:
            return 1.0
        while high - low > TOLERANCE:
            middle = (low + high) / 2
            if self.payload_of(config, method, math.exp(middle)) <= budget:
                low = middle
            else:
                high = middle
        return math.exp(low)


def at_densities(config: CompareConfig, methods: Sequence[Method]) -> list[MethodAt]:
    """Every method at every density; a method without an open density runs once."""
    return [
        MethodAt(method, density)
        for method in methods
        for density in (config.densities if method.takes_density else (None,))
    ]


def at_equal_bytes(config: CompareConfig, methods: Sequence[Method], problem: Problem) -> list[MethodAt]:
    """Every method at the largest density within the budget; those that keep a budget are told it.

    The budget is of a step. After H steps without an exchange, a message may be H times as long.

    Raises:
        ArgumentError: the budget is too small for one of them.
    """
    if not any(method.takes_density or method.with_budget(1) is not method for method in methods):
        return [MethodAt(method, None) for method in methods]  # nothing to find out
    probe = PayloadProbe(problem.task([0]), min(NUM_STEPS, config.num_steps))
    budget = config.bytes_per_step or probe.payload_of(config, Method.parse_like(config.like), None)
    runs = []
    for given in methods:
        own_budget = budget * given.rounds.every
        method = given.with_budget(own_budget)
        density = probe.find_density(config, method, own_budget) if method.takes_density else None
        runs.append(MethodAt(method, density))
    return runs
