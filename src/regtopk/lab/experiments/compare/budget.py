"""At which densities methods run: those of the settings, or the largest within a number of bytes."""

import math
from dataclasses import replace
from functools import cache

from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.config import CompareConfig, GridAt, MethodAt
from regtopk.lab.experiments.tasks import Problem, Task
from regtopk.lab.experiments.training.trainer import parts_of
from regtopk.lab.method import Grid, Method
from regtopk.rounds import GRADIENTS
from regtopk.simulate import Cluster

NUM_STEPS = 4
TOLERANCE = 0.005  # of the density's logarithm


class ByteProbe:
    """The gradients of a task's first steps, at its first model, to measure what methods move.

    Fragments are messages of their own, each with its frame.
    """

    def __init__(self, config: CompareConfig, task: Task) -> None:
        models = task.start()
        num_steps = min(NUM_STEPS, config.num_steps)  # a task has no more batches
        self._grads = [task.grads(models, step)[0][0].clone() for step in range(num_steps)]
        self._config, self._task = config, task

    def bytes_of(self, method: Method, density: float | None) -> float:
        """What the budget counts, payload or bytes received: the mean per worker and step."""
        num_bytes = 0.0
        for at, layout in parts_of(self._task.layout, method.rounds.fragments):
            cluster = Cluster(
                self._config.build(MethodAt(method, density)),
                num_workers=self._task.num_workers,
                weights=self._task.weights[0],
                layout=layout,
                index_code=method.index_code,
            )
            for grads in self._grads:
                cluster.step(grads[:, at])
            num_bytes += float(getattr(cluster.total, self._config.budgeted).double().mean())
        return num_bytes / len(self._grads)

    def find_density(self, method: Method, budget: float) -> float:
        """The largest density whose bytes are within the budget, by bisection of its logarithm.

        Recorded runs have densities that were found so: with others they could not be resumed.
        """
        low, high = math.log(1 / self._task.layout.numel), 0.0
        smallest = self.bytes_of(method, math.exp(low))
        if smallest > budget:
            is_returned = method.options.get("returned") is not None
            what = "what comes back alone" if is_returned else "the smallest message"
            raise ArgumentError(
                f"bytes per step must be at least {smallest:.0f}, {what} of {method.label}, got {budget:.0f}"
            )
        if self.bytes_of(method, 1.0) <= budget:
            return 1.0
        while high - low > TOLERANCE:
            middle = (low + high) / 2
            fits = self.bytes_of(method, math.exp(middle)) <= budget
            low, high = (middle, high) if fits else (low, middle)
        return math.exp(low)


def rows_of(config: CompareConfig, problem: Problem) -> list[GridAt]:
    """Every method at every density, or at the largest density within the budget of bytes.

    A method without an open density runs once. The budget is of a step. After H steps without an exchange, a
    message may be H times as long. Methods that keep to a payload by themselves are told it.
    """
    if not config.is_at_equal_bytes:
        return [
            GridAt(grid, {at: MethodAt(method, density) for at, method in grid.methods.items()})
            for grid in config.grids
            for density in (config.densities if grid.takes_density else (None,))
        ]
    probe = ByteProbe(config, problem.task([0]))
    budget = config.bytes_per_step or config.received_bytes_per_step
    budget = budget or probe.bytes_of(Method.parse_like(config.base_words), None)
    find_density = cache(probe.find_density)

    def within(grid: Grid, given: Method) -> MethodAt:
        own_budget = budget * given.rounds.every
        method = given.with_budget(own_budget) if config.budgeted == "payload_bytes" else given
        # without what changes no message, so that points of a grid share what is found
        rounds = GRADIENTS._replace(fragments=given.rounds.fragments)
        alike = replace(method, label=grid.label, lr=None, optimizer="", weight_decay=None, beta2=None)
        alike = replace(alike, rounds=rounds)
        return MethodAt(method, find_density(alike, own_budget) if method.takes_density else None)

    return [
        GridAt(grid, {at: within(grid, method) for at, method in grid.methods.items()})
        for grid in config.grids
    ]
