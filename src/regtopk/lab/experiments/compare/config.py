"""Many methods on one task, at equal density or at equal bytes, over several seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from regtopk.algorithms import ALGORITHMS
from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_choice, check_integer, check_number, check_positive
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.comparison import Comparison
from regtopk.lab.experiments.compare.protocol import Plan, Run, parse_methods
from regtopk.lab.experiments.compare.results import summarise
from regtopk.lab.experiments.experiment import Summary
from regtopk.lab.experiments.settings import format_seeds, parse_seeds
from regtopk.lab.experiments.tasks.deep import Gpt, GptSettings
from regtopk.lab.experiments.tasks.small import TASKS
from regtopk.lab.experiments.tasks.task import Problem, Task
from regtopk.lab.experiments.training.optimizers import OPTIMIZERS
from regtopk.lab.runs import Panel, Record

NETWORK = ("num_layers", "width", "context")  # sizes of a network that has some to choose
DEFAULTED = ("num_workers", "num_steps", "batch_size", "optimizer", *NETWORK)


@dataclass(frozen=True)
class CompareConfig(GptSettings):
    """Settings of a comparison; 0 and empty words become the task's own defaults.

    Args:
        task: one of `TASKS`.
        algorithms: methods as NAME[:OPTION=VALUE]..., with commas between them; empty: every algorithm.
            Options are the algorithm's own, lr, index_code, residual_dtype, optimizer, and what is
            exchanged: exchange=updates with every, outer, outer_lr and outer_momentum.
        densities: share of the entries sent, k / J. Several, with commas, are compared one by one.
        bytes_per_step: mean payload per worker and step, instead of a density; 0: off. A method that
            exchanges updates after every second step may send twice as much then.
        optimizer: what applies the aggregate: sgd, momentum (0.9), adam, adamw, or sgdw, which has adamw's
            schedule and weight decay. Where updates are exchanged, every worker has its own. Empty: sgd, and
            adamw for gpt.
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
    optimizer: str = ""
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
        self._check_task()
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
        used: dict[str, Any] = {name: getattr(self, name) or getattr(defaults, name) for name in DEFAULTED}
        used["algorithms"] = ",".join(m.label for m in parse_methods(self.algorithms or ",".join(ALGORITHMS)))
        used["lr"] = self.lr or (defaults.lr,)
        if self.seeds:
            used["num_seeds"] = len(parse_seeds(self.seeds))
        for name, value in used.items():
            object.__setattr__(self, name, value)

    def _check_task(self) -> None:
        """Refuse settings that the task does not have, and rounds that do not fit it."""
        task = TASKS[self.task]
        if issubclass(task, Gpt):
            self.check_network()
        else:
            for name in (*NETWORK, "precision"):
                if getattr(self, name) != getattr(GptSettings, name):
                    raise ArgumentError(
                        f"{name} must not be given for {self.task}, whose network is fixed, "
                        f"got {getattr(self, name)!r}"
                    )
        for method in self.plan.methods:
            if method.rounds.has_updates and not task.has_own_models:
                can = ", ".join(name for name, own in TASKS.items() if own.has_own_models)
                raise ArgumentError(f"exchange=updates needs one of the tasks {can}, got {self.task!r}")
            if self.num_steps % method.rounds.every:
                raise ArgumentError(
                    f"every must divide the number of steps, {self.num_steps}, got {method.label!r}"
                )

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
            base=task.base,
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


class ComparedProblem(Problem):
    """A task, for any seeds.

    Raises:
        ArgumentError: there is no such data, or the task takes none.
    """

    def __init__(self, config: CompareConfig) -> None:
        super().__init__()
        self._config = config
        self._make = TASKS[config.task]
        self._examples = self._make.load(config)
        self.numel = self.task(config.plan.seeds).layout.numel

    def make_task(self, seeds: Sequence[int]) -> Task:
        """All of them on the same examples."""
        return self._make(self._config, seeds, self._examples)

    @property
    def contents(self) -> dict[str, str]:
        """What tells its examples from others of the same name."""
        return dict(self._make.contents_of(self._examples))


def summarise_comparison(config: CompareConfig, records: Sequence[Record]) -> Summary:
    """Where each method ended, its spread, its bytes, and the paired difference from Top-k, or from dense."""
    better = "higher" if config.plan.is_better_higher else "smaller"
    return {"task": config.task, "better": better, **summarise(config, records)}


def panels(config: CompareConfig) -> Sequence[Panel]:
    """Loss against iterations, quality against bytes, and where each method ended."""
    task, metric = TASKS[config.task], config.plan.metric
    words, log = task.metric_words or metric, task.has_log_axis
    name = words.split(",")[0].capitalize()
    at_each: list[dict[str, float]] = (
        [{}] if config.is_at_equal_bytes else [{"density": d} for d in config.densities]
    )
    shown = []
    for where in at_each:
        suffix = f", density {where['density']:g}" if where and len(at_each) > 1 else ""
        shown += [
            Panel(
                f"Loss{suffix}", "step", "loss", "iteration", "training loss", where=where, log_y=log
            ),
            Panel(
                f"{name} against bytes{suffix}", "payload_bytes", metric,
                "bytes a worker has contributed", words, where=where, log_x=True, log_y=log,
            ),
            Panel(
                f"{name} at the end{suffix}", "step", metric, words, "", where=where,
                log_x=log, marks="bars",
            ),
        ]  # fmt: skip
    return shown


def description_of(config: CompareConfig) -> str:
    """What the page shows, and how runs are judged."""
    task, num_last = TASKS[config.task], config.plan.num_last
    judged = "are the last evaluation" if num_last == 1 else "average the last three evaluations"
    unit = f" It is the {task.metric_words}: smaller is better." if task.metric_words else ""
    recipe = OPTIMIZERS[config.optimizer]
    clips = (
        f" Norms above {recipe.max_norm:g} are clipped: of the aggregate where gradients are exchanged, of "
        "each worker's own gradients where updates are. Bytes per step are those of a local step."
        if recipe.max_norm
        else ""
    )
    return (
        "All methods start from the same models and see the same batches. Bytes are what one worker "
        f"contributes, frames included. Final numbers {judged}."
        f"{unit}{clips}"
    )


COMPARE = Comparison(
    name="compare",
    title="Methods compared",
    about=description_of,
    config=CompareConfig,
    load=ComparedProblem,
    summarise=summarise_comparison,
    panels=panels,
)
