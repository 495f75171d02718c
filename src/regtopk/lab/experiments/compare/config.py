"""The settings of a comparison of methods on one task, checked before anything runs."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from regtopk.algorithms import ALGORITHMS
from regtopk.core.algorithm import Algorithm
from regtopk.core.codes import INDEX_CODES, VALUE_CODES
from regtopk.core.options import check_choice, check_options, check_positive, integer, one_of, option, within
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data.splits import check_split
from regtopk.lab.experiments.settings import check_densities, parse_seeds, settings_of
from regtopk.lab.experiments.tasks import TASKS, Task, TaskSettings
from regtopk.lab.experiments.training.optimizers import OPTIMIZERS, WITH_BETA2
from regtopk.lab.method import Grid, GridPoint, Method

OWN = ("data", "algorithms", "seeds")  # settings in which runs of one folder may differ


class MethodAt(NamedTuple):
    """A method, and the density it runs at if its words leave that open."""

    method: Method
    density: float | None


class GridAt(NamedTuple):
    """A row of a comparison: what runs at each point of a grid. One of these is picked."""

    grid: Grid
    runs: dict[GridPoint, MethodAt]

    @property
    def density(self) -> float | None:
        """Of all its runs or, at equal bytes, of the first."""
        return next(iter(self.runs.values())).density


@dataclass(frozen=True)
class CompareConfig(TaskSettings):
    """Settings of a comparison; 0 and empty words become the task's own defaults.

    Args:
        algorithms: methods as NAME[:OPTION=VALUE]..., with commas between them; if not given, all.
            Options are the algorithm's own, lr, index_code, residual_dtype, optimizer, weight_decay, beta2 of
            Adam, and what is exchanged: exchange=updates with every, fragments, delay, mix, clip_norm,
            outer, outer_lr, outer_momentum. every=4/4/4/1 makes the last of four workers four times slower:
            in a round it makes one step, and then waits. Weights follow the steps.
            An option may have several values, every=2|4|8. They are searched on a seed that is not counted.
        densities: share of the entries sent, k / J. Several, with commas, are compared one by one.
        bytes_per_step: mean payload per worker and step, instead of a density; 0: off. A method that
            exchanges updates after every second step may send twice as much then.
        like: instead of a density, the bytes per step that another method sends, written as
            NAME:DENSITY:INDEX_CODE:VALUE_CODE, such as topk:0.001:raw32:float32.
        received_bytes_per_step: what a worker receives per step on the mean, instead of a density; 0: off.
            With all_gather that is everybody's messages. A method's returned part is kept.
        like_received: instead of a density, what a worker receives with another method, written as in like.
        value_code: how values travel, for methods that do not name a code.
        index_code: how indices travel, for methods that do not name a code.
        optimizer: what applies the aggregate: sgd, momentum (0.9), adam, adamw, sgdw, which has adamw's
            schedule and weight decay, or, for gpt, muon: Muon for the matrices in blocks and adamw for the
            rest, or lmo: orthogonalised matrices and signs, without momentum. Where updates are exchanged,
            every worker has its own. Empty: sgd, and adamw for gpt.
        lr: learning rate. Of several, with commas, each method takes its best on a seed that is not counted.
        num_search_runs: how many runs the search of a method has, from the middle of each list on, one option
            after another; 0: one for each combination.
        seeds: how many, from 0 on: 3. Or which: 3,4,5 or 2-6, and 3-3 for seed 3 alone.
        num_evaluations: how many times models are evaluated along the way.
        deterministic: use only bit-reproducible kernels.
    """

    algorithms: str = ""
    densities: tuple[float, ...] = option((0.01,), check_densities)
    bytes_per_step: float = option(0.0, within("[0, inf)"))
    like: str = ""
    received_bytes_per_step: float = option(0.0, within("[0, inf)"))
    like_received: str = ""
    value_code: str = option("float32", one_of(*VALUE_CODES))
    index_code: str = option("elias-fano", one_of(*INDEX_CODES))
    optimizer: str = option("", one_of(*OPTIMIZERS))
    lr: tuple[float, ...] = ()
    num_search_runs: int = option(0, integer(at_least=0))
    seeds: str = "1"
    num_evaluations: int = option(15, integer(at_least=1))
    deterministic: bool = False

    def __post_init__(self) -> None:
        check_choice("task", self.task, TASKS)
        for name, default in {"optimizer": "sgd", **self.defaults}.items():
            object.__setattr__(self, name, getattr(self, name) or default)
        labels = (self.algorithms or ",".join(ALGORITHMS)).split(",")
        object.__setattr__(self, "algorithms", ",".join(word.strip() for word in labels if word.strip()))
        check_options(self)
        parse_seeds(self.seeds)
        check_split(self.split)

        for lr in self.lr:
            check_positive("lr", lr)
        self._check_budget()
        self.kind.check(self)
        self._check_methods()

    def _check_budget(self) -> None:
        if self.base_words:
            Method.parse_like(self.base_words)
        names = "bytes_per_step", "like", "received_bytes_per_step", "like_received"
        given = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name)]
        if given and len(self.densities) > 1:
            given.append(f"densities={self.densities}")
        if len(given) > 1:
            raise ArgumentError(
                f"give one of {', '.join(names)} and several densities, got {', '.join(given)}"
            )

    def _check_methods(self) -> None:
        identities = {frozenset(map(self._identity, grid.methods.values())) for grid in self.grids}
        if not self.grids or len(identities) < len(self.grids):
            raise ArgumentError(f"methods must be different and at least one, got {self.algorithms!r}")
        for method in self.methods:
            check_choice("optimizer", method.optimizer, OPTIMIZERS)
            if method.beta2 is not None and method.optimizer not in WITH_BETA2:
                known = " or ".join(WITH_BETA2)
                raise ArgumentError(f"beta2 must stand with optimizer={known}, got {method.label!r}")
            if OPTIMIZERS[method.optimizer].muon_momentum is not None and not self.kind.has_blocks:
                raise ArgumentError(
                    f"optimizer must not be {method.optimizer} for {self.task}, whose model has no blocks of "
                    f"matrices, got {method.label!r}"
                )
            if method.rounds.by_worker and len(method.rounds.by_worker) != self.num_workers:
                raise ArgumentError(
                    f"every must have a number for each of {self.num_workers} workers, got {method.label!r}"
                )
            if self.num_steps % method.rounds.every:
                raise ArgumentError(f"every must divide num_steps = {self.num_steps}, got {method.label!r}")

    @property
    def kind(self) -> type[Task]:
        """What is learned, and how it is judged."""
        return TASKS[self.task]

    @property
    def metric_words(self) -> str:
        """How it is judged, for people, with its unit."""
        token = {"characters": "character", "bytes": "byte"}.get(self.tokens, "token")
        return self.kind.metric_words.format(token=token)

    @property
    def defaults(self) -> dict[str, Any]:
        """What is used where the settings say nothing."""
        return self.kind.defaults

    @cached_property
    def grids(self) -> list[Grid]:
        """What is compared."""
        grids = (Grid.parse(words, self.lr) for words in self.algorithms.split(",") if words)
        return [replace(g, methods={at: self.complete(m) for at, m in g.methods.items()}) for g in grids]

    @property
    def methods(self) -> list[Method]:
        """All that may run."""
        return [method for grid in self.grids for method in grid.methods.values()]

    @property
    def chosen_seeds(self) -> list[int]:
        """All seeds."""
        return parse_seeds(self.seeds)

    @cached_property
    def stops(self) -> list[int]:
        """The steps after which models are evaluated; the last one ends the training."""
        num = self.num_evaluations
        return sorted({round(self.num_steps * i / num) for i in range(num + 1)})

    @property
    def is_at_equal_bytes(self) -> bool:
        """Whether densities follow from a number of bytes."""
        return bool(self.base_words or self.bytes_per_step or self.received_bytes_per_step)

    @property
    def base_words(self) -> str:
        """The method whose bytes all others may move, if one is named."""
        return self.like or self.like_received

    @property
    def budgeted(self) -> str:
        """Which count of `core.traffic` a budget of bytes is of."""
        return "received_bytes" if self.received_bytes_per_step or self.like_received else "payload_bytes"

    @property
    def shared(self) -> dict[str, Any]:
        """All settings that every run of a results folder shares."""
        return {key: value for key, value in settings_of(self).items() if key not in OWN}

    def build(self, run: MethodAt) -> Algorithm[Any]:
        """The algorithm that the workers run."""
        return run.method.build(density=run.density, value_code=self.value_code)

    def complete(self, method: Method) -> Method:
        """A method with the codes and the optimizer of the settings where its words name none."""
        return replace(
            method,
            index_code=method.index_code or self.index_code,
            optimizer=method.optimizer or self.optimizer,
            residual_dtype=method.residual_dtype or "float32",
        )

    def _identity(self, method: Method) -> tuple[Any, ...]:
        """What two spellings of a method share. An open density is a number only if all methods share it."""
        is_open = method.takes_density and (self.is_at_equal_bytes or len(self.densities) > 1)
        algorithm = method.build(density=self.densities[0], value_code=self.value_code)
        return algorithm, is_open, replace(method, label="", options={})
