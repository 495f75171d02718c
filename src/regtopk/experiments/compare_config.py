"""Settings of a comparison, checked before anything runs."""

import math
from dataclasses import dataclass
from pathlib import Path

from regtopk.algorithms import ALGORITHMS
from regtopk.core.algorithm import check_density
from regtopk.core.codes import check_index_code, check_value_code
from regtopk.errors import ArgumentError
from regtopk.experiments.fleet import OPTIMIZERS
from regtopk.experiments.methods import parse_method
from regtopk.experiments.settings import check_count, check_device, check_positive, check_word
from regtopk.experiments.splits import check_split
from regtopk.experiments.tasks import TASKS, TaskConfig

SIZES = ("num_workers", "num_steps", "batch_size")


@dataclass(frozen=True)
class CompareConfig:
    """Settings of a comparison; 0 and empty words mean the task's own default, and become it.

    Args:
        task: one of `TASKS`.
        algorithms: methods with commas, as NAME[:OPTION=VALUE]...; empty: every algorithm.
        densities: k / J of the methods that take one, each a comparison of its own.
        bytes_per_step: mean payload a worker and step, instead of densities; 0: off.
        like: sets it from a method NAME:DENSITY:INDEX_CODE:VALUE_CODE, such as topk:0.001:raw32:float32.
        value_code: of the methods whose words do not say.
        index_code: how indices are counted.
        split: iid, unequal, sorted[:SHARDS] or dirichlet[:ALPHA].
        optimizer: sgd, momentum (0.9) or adam.
        lr: learning step lengths; of several, each method takes its best on a seed that is not counted.
        num_seeds: seeds 0 to num_seeds - 1.
        num_workers, num_steps, batch_size: of the task.
        num_evaluations: along the way.
        data: where the data set is.
        device: cpu or cuda.
    """

    task: str = "digits"
    algorithms: str = ""
    densities: tuple[float, ...] = (0.01,)
    bytes_per_step: float = 0.0
    like: str = ""
    value_code: str = "float32"
    index_code: str = "elias-fano"
    split: str = "iid"
    optimizer: str = "sgd"
    lr: tuple[float, ...] = ()
    num_seeds: int = 1
    num_workers: int = 0
    num_steps: int = 0
    batch_size: int = 0
    num_evaluations: int = 15
    data: str = ""
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the settings."""
        for kind, name, table in (("task", self.task, TASKS), ("optimizer", self.optimizer, OPTIMIZERS)):
            check_word(kind, name, table)
        self._fill_in_defaults()
        for method in self.methods:
            parse_method(method)
        for density in self.densities:
            check_density(density)
        for name, listed in (("algorithms", self.methods), ("densities", self.densities)):
            if not listed or len(set(listed)) < len(listed):
                raise ArgumentError(f"{name} must be different and at least one, got {listed}")
        for lr in self.lr:
            check_positive("lr", lr)
        check_value_code(self.value_code)
        check_index_code(self.index_code)
        check_split(self.split)
        check_device(self.device)
        for name in ("num_seeds", "num_evaluations", *SIZES):
            check_count(name, getattr(self, name))
        if not 0 <= self.bytes_per_step < math.inf:
            raise ArgumentError(f"bytes_per_step must be positive (0: off), got {self.bytes_per_step}")
        if self.bytes_per_step and self.like:
            raise ArgumentError(
                f"give one of bytes_per_step and like, got {self.bytes_per_step}, {self.like!r}"
            )
        if self.like:
            parse_like(self.like)

    def _fill_in_defaults(self) -> None:
        """What is recorded is what is used."""
        defaults = TASKS[self.task].defaults
        used = {name: getattr(self, name) or int(defaults[name]) for name in SIZES}
        used |= {"algorithms": ",".join(self.methods), "lr": self.lr or (defaults["lr"],)}
        for name, value in used.items():
            object.__setattr__(self, name, value)

    @property
    def methods(self) -> list[str]:
        """The methods as words."""
        return [word.strip() for word in self.algorithms.split(",") if word.strip()] or list(ALGORITHMS)

    @property
    def is_at_equal_bytes(self) -> bool:
        """Whether densities follow from a byte budget."""
        return bool(self.bytes_per_step or self.like)

    def task_config(self) -> TaskConfig:
        """What the task is made from."""
        return TaskConfig(
            num_workers=self.num_workers,
            num_steps=self.num_steps,
            batch_size=self.batch_size,
            split=self.split,
            data=Path(self.data) if self.data else None,
            device=self.device,
        )


def parse_like(like: str) -> tuple[str, float, str, str]:
    """Read NAME:DENSITY:INDEX_CODE:VALUE_CODE."""
    words = like.split(":")
    if len(words) != 4:
        raise ArgumentError(f"like must be NAME:DENSITY:INDEX_CODE:VALUE_CODE, got {like!r}")
    name, density, index_code, value_code = words
    parse_method(name)
    try:
        number = check_density(float(density))
    except ValueError:
        raise ArgumentError(f"like must name a density in (0, 1], got {like!r}") from None
    return name, number, check_index_code(index_code), check_value_code(value_code)
