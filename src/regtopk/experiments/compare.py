"""Many methods on one small task, at equal density or at equal bytes, over several seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from regtopk.algorithms import ALGORITHMS
from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_choice, check_integer, check_number, check_positive
from regtopk.errors import ArgumentError
from regtopk.experiments.comparison import Comparison
from regtopk.experiments.experiment import Summary
from regtopk.experiments.images import load_images, standardised
from regtopk.experiments.protocol import Plan, Protocol, Run, parse_methods
from regtopk.experiments.results import summarise
from regtopk.experiments.settings import format_seeds, parse_seeds
from regtopk.experiments.task import Problem, Task
from regtopk.experiments.tasks import TASKS
from regtopk.runs import Panel, Record

SIZES = ("num_workers", "num_steps", "batch_size")


@dataclass(frozen=True)
class CompareConfig(Protocol):
    """Settings of a comparison; 0 and empty words become the task's own defaults.

    Args:
        task: one of `TASKS`.
        algorithms: methods as NAME[:OPTION=VALUE]..., with commas between them; empty: every algorithm.
        densities: share of the entries sent, k / J. Several, with commas, are compared one by one.
        bytes_per_step: mean payload per worker and step, instead of a density; 0: off.
        lr: learning rate. Of several, with commas, each method takes its best on a seed that is not counted.
        num_seeds: seeds 0 to num_seeds - 1.
        seeds: which seeds instead, such as 3,4,5 or 2-6.
        num_steps: how many steps, T.
        num_evaluations: how many times models are evaluated along the way.
    """

    task: str = "digits"
    algorithms: str = ""
    densities: tuple[float, ...] = (0.01,)
    bytes_per_step: float = 0.0
    lr: tuple[float, ...] = ()
    num_seeds: int = 1
    seeds: str = ""
    num_workers: int = 0
    num_steps: int = 0
    batch_size: int = 0
    num_evaluations: int = 15

    free: ClassVar[tuple[str, ...]] = ("data", "algorithms", "num_seeds", "seeds")

    def __post_init__(self) -> None:
        """Check the settings."""
        check_choice("task", self.task, TASKS)
        self._fill_in_defaults()
        if not self.densities or len(set(self.densities)) < len(self.densities):
            raise ArgumentError(f"densities must be different and at least one, got {self.densities}")
        for name in ("num_seeds", "num_steps", "num_evaluations"):
            check_integer(name, getattr(self, name), at_least=1)
        super().__post_init__()
        for lr in self.lr:
            check_positive("lr", lr)
        check_number(
            "bytes_per_step", self.bytes_per_step, "positive (0: off)", lambda x: 0 <= x < float("inf")
        )
        if self.bytes_per_step and self.like:
            raise ArgumentError(
                f"give one of bytes_per_step and like, got {self.bytes_per_step}, {self.like!r}"
            )

    def _fill_in_defaults(self) -> None:
        """Put the defaults in, so that the settings that are recorded are those that are used."""
        defaults = TASKS[self.task].defaults
        used: dict[str, Any] = {name: getattr(self, name) or getattr(defaults, name) for name in SIZES}
        used["algorithms"] = ",".join(m.label for m in parse_methods(self.algorithms or ",".join(ALGORITHMS)))
        used["lr"] = self.lr or (defaults.lr,)
        if self.seeds:
            used["num_seeds"] = len(parse_seeds(self.seeds))
        for name, value in used.items():
            object.__setattr__(self, name, value)

    @cached_property
    def plan(self) -> Plan:
        """What is run, and how it is judged. Accuracies are noisy, so the last three are averaged."""
        seeds = parse_seeds(self.seeds or str(self.num_seeds))
        num, task = self.num_evaluations, TASKS[self.task]
        return Plan(
            methods=parse_methods(self.algorithms),
            seeds=seeds,
            num_at_once=len(seeds),
            densities=self.densities,
            lrs=self.lr,
            stops=sorted({round(self.num_steps * i / num) for i in range(num + 1)}),
            num_last=3 if task.is_better_higher else 1,
            metric=task.metric,
            is_better_higher=task.is_better_higher,
            budget=self.bytes_per_step or None,
        )

    def with_slices(self, labels: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
        """The settings that name these methods and seeds."""
        words = format_seeds(seeds)
        which = "" if words.isdigit() else words
        return {"algorithms": ",".join(labels), "num_seeds": len(seeds), "seeds": which}

    def recorded_density(self, run: Run, algorithm: Algorithm[Any], numel: int) -> float | None:
        """The density of the comparison. It is None for a method that has its own, shown at every density."""
        return run.density


class SmallProblem(Problem):
    """A small task, for any seeds.

    Raises:
        ArgumentError: there is no such data, or the task takes none.
    """

    def __init__(self, config: CompareConfig) -> None:
        super().__init__()
        self._config = config
        self._make = make = TASKS[config.task]
        if config.data and not make.data_set:
            raise ArgumentError(
                f"data must be empty for {config.task}, which reads none, got {config.data!r}"
            )
        self._images = None
        if make.data_set:
            path = Path(config.data) if config.data else None
            self._images = standardised(load_images(make.data_set, path, config.device))
        self.numel = self.task(config.plan.seeds).layout.numel

    def make_task(self, seeds: Sequence[int]) -> Task:
        """All of them on the same images."""
        return self._make(self._config, seeds, self._images)


def summarise_comparison(config: CompareConfig, records: Sequence[Record]) -> Summary:
    """Where each method ended, its spread, its bytes, and the paired difference from Top-k."""
    return {"task": config.task, **summarise(config, records)}


def panels(config: CompareConfig) -> Sequence[Panel]:
    """Loss against iterations, quality against bytes, and where each method ended."""
    metric, is_distance = config.plan.metric, not config.plan.is_better_higher
    at_each: list[dict[str, float]] = (
        [{}] if config.is_at_equal_bytes else [{"density": d} for d in config.densities]
    )
    shown = []
    for where in at_each:
        suffix = f", density {where['density']:g}" if where and len(at_each) > 1 else ""
        shown += [
            Panel(
                f"Loss{suffix}", "step", "loss", "iteration", "training loss", where=where, log_y=is_distance
            ),
            Panel(
                f"{metric.capitalize()} against bytes{suffix}", "payload_bytes", metric,
                "bytes a worker has contributed", metric, where=where, log_x=True, log_y=is_distance,
            ),
            Panel(
                f"{metric.capitalize()} at the end{suffix}", "step", metric, metric, "", where=where,
                log_x=is_distance, marks="bars",
            ),
        ]  # fmt: skip
    return shown


COMPARE = Comparison(
    name="compare",
    title="Methods compared",
    about=(
        "All methods start from the same models and see the same batches. Lines are medians over seeds, "
        "shades the range. Bytes are what one worker contributes, frames included. "
        "The table averages the last three evaluations; the last panel shows the very last."
    ),
    config=CompareConfig,
    load=SmallProblem,
    summarise=summarise_comparison,
    panels=panels,
)
