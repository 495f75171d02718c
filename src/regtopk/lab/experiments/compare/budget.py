"""Which density makes a method send a given number of bytes: the method is run to find out."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from regtopk.core.algorithm import Algorithm
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.protocol import Protocol, Run
from regtopk.lab.experiments.tasks.task import Problem, Task
from regtopk.lab.method import Method
from regtopk.simulate import Cluster

NUM_STEPS = 4
TOLERANCE = 0.005  # of the density's logarithm


class Probe:
    """The gradients of a task's first steps, to measure what a method sends.

    Args:
        task: its first seed is used, at its first model.
        num_steps: of how many steps; a task has no more batches than steps.
    """

    def __init__(self, task: Task, num_steps: int = NUM_STEPS) -> None:
        models = task.start()
        self.grads = [task.grads(models, step, lr=0.0)[0][0].clone() for step in range(num_steps)]
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

    def find_density(
        self, make: Callable[[float], Algorithm[Any]], index_code: str, budget: float, *, name: str
    ) -> float:
        """The largest density whose payload is within the budget, by bisection of its logarithm.

        Raises:
            ArgumentError: a message of one entry already takes more.
        """
        low, high = math.log(1 / self.layout.numel), 0.0
        smallest = self.payload(make(math.exp(low)), index_code)
        if smallest > budget:
            raise ArgumentError(
                f"the budget of bytes per step must be at least the smallest message of {name}, "
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


def runs_at_densities(config: Protocol, methods: Sequence[Method]) -> list[Run]:
    """Every method at every density; a method without an open density runs once."""
    return [
        Run(method, density)
        for method in methods
        for density in (config.plan.densities if method.takes_density else (None,))
    ]


def runs_at_equal_bytes(config: Protocol, methods: Sequence[Method], problem: Problem) -> list[Run]:
    """Every method at the largest density within the budget; those that keep a budget are told it.

    The budget is of a step. After H steps without an exchange, a message may be H times as long.

    Raises:
        ArgumentError: the budget is too small for one of them.
    """
    if not any(method.takes_density or method.with_budget(1) is not method for method in methods):
        return [Run(method, None) for method in methods]  # nothing to find out
    probe = Probe(problem.probe(), min(NUM_STEPS, config.plan.stops[-1]))
    budget = config.plan.budget
    if budget is None:
        like = Method.parse_like(config.like)
        budget = probe.payload(config.build(Run(like, None)), config.index_code_of(like))
    runs = []
    for given in methods:
        density, own_budget = None, budget * given.rounds.every
        method = given.with_budget(own_budget)
        if method.takes_density:
            make, index_code = partial(_build, config, method), config.index_code_of(method)
            density = probe.find_density(make, index_code, own_budget, name=method.label)
        runs.append(Run(method, density))
    return runs


def _build(config: Protocol, method: Method, density: float) -> Algorithm[Any]:
    return config.build(Run(method, density))
