"""How methods are compared: the settings that every comparison has, checked before anything runs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

from regtopk.core.algorithm import Algorithm, check_density
from regtopk.core.codes import check_index_code, check_value_code
from regtopk.core.options import check_choice, check_integer
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data.splits import check_split
from regtopk.lab.experiments.settings import settings_of
from regtopk.lab.experiments.training.optimizers import OPTIMIZERS
from regtopk.lab.method import Method


class Run(NamedTuple):
    """A method, and the density it runs at if its words leave that open."""

    method: Method
    density: float | None

    @property
    def name(self) -> str:
        """What tells runs of an experiment apart."""
        return self.method.label if self.density is None else f"{self.method.label} at {self.density!r}"


@dataclass(frozen=True)
class Plan:
    """What a comparison runs, and how it is judged.

    Args:
        methods: all of them.
        seeds: all of them.
        num_at_once: how many seeds of a method are trained at once.
        densities: for methods whose words name none. Each density is a comparison of its own.
        lrs: learning rates. If there are several, each method takes its best.
        stops: models are evaluated after these steps; the last one ends the training.
        num_last: the final number of a run is the mean of so many of its last evaluations.
        metric: what says how good a model is.
        is_better_higher: whether more of the metric is better.
        base: the algorithm that differences are taken from, where it exchanges gradients: topk or dense.
        budget: bytes per worker and step, if they are given as a number.
        is_against_like: whether differences are taken from the method that `like` names, not from the base.
    """

    methods: list[Method]
    seeds: list[int]
    num_at_once: int
    densities: Sequence[float]
    lrs: Sequence[float]
    stops: list[int]
    num_last: int
    metric: str = "accuracy"
    is_better_higher: bool = True
    base: str = "topk"
    budget: float | None = None
    is_against_like: bool = False


@dataclass(frozen=True)
class Protocol(ABC):
    """Settings of a comparison of methods on one task, over seeds.

    Args:
        split: how examples are divided among workers: iid, unequal, sorted[:SHARDS] or dirichlet[:ALPHA].
        optimizer: what applies the aggregate: sgd, momentum (0.9), adam, adamw or sgdw, for methods that do
            not name one.
        like: instead of a density, the bytes per step that another method sends, written as
            NAME:DENSITY:INDEX_CODE:VALUE_CODE, such as topk:0.001:raw32:float32.
        value_code: how values travel, for methods that do not name a code.
        index_code: how indices travel, for methods that do not name a code.
        num_workers: how many simulated workers, N.
        batch_size: examples per worker and step, B.
        data: where the data set is.
        deterministic: use only bit-reproducible kernels. On a GPU, a run can then be resumed in its middle.
        device: where to compute: cpu or cuda.
    """

    split: str = "iid"
    optimizer: str = "sgd"
    like: str = ""
    value_code: str = "float32"
    index_code: str = "elias-fano"
    num_workers: int = 8
    batch_size: int = 20
    data: str = ""
    deterministic: bool = False
    device: str = "cpu"

    free: ClassVar[tuple[str, ...]] = ("data",)  # settings in which runs of one folder may differ

    def __post_init__(self) -> None:
        """Check the settings."""
        check_split(self.split)
        check_value_code(self.value_code)
        check_index_code(self.index_code)
        check_integer("num_workers", self.num_workers, at_least=1)
        check_integer("batch_size", self.batch_size, at_least=1)
        for density in self.plan.densities:
            check_density(density)
        if self.like:
            Method.parse_like(self.like)
        methods = self.plan.methods
        for name in (self.optimizer, *(self.optimizer_of(method) for method in methods)):
            check_choice("optimizer", name, OPTIMIZERS)
        if not methods or len({self._identity(method) for method in methods}) < len(methods):
            labels = ",".join(method.label for method in methods)
            raise ArgumentError(f"methods must be different and at least one, got {labels!r}")

    @cached_property
    @abstractmethod
    def plan(self) -> Plan:
        """What is run, and how it is judged."""

    @property
    def is_at_equal_bytes(self) -> bool:
        """Whether densities follow from a number of bytes."""
        return bool(self.like or self.plan.budget)

    @abstractmethod
    def with_slices(self, labels: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
        """The settings that name these methods and seeds: those of all slices in a folder."""

    def recorded_density(self, run: Run, algorithm: Algorithm[Any], numel: int) -> float | None:
        """The density in the records of a run."""
        k, density = getattr(algorithm, "k", None), getattr(algorithm, "density", None)
        return density if k is None else k / numel

    @property
    def shared(self) -> dict[str, Any]:
        """All settings that every run of a results folder shares."""
        return {key: value for key, value in settings_of(self).items() if key not in self.free}

    def build(self, run: Run) -> Algorithm[Any]:
        """The algorithm that the workers run."""
        return run.method.build(density=run.density, value_code=self.value_code)

    def index_code_of(self, method: Method) -> str:
        """How a method's indices travel."""
        return method.index_code or self.index_code

    def optimizer_of(self, method: Method) -> str:
        """What follows a method's aggregate, or its workers' gradients: one of `OPTIMIZERS`."""
        return method.optimizer or self.optimizer

    def is_like(self, method: Method) -> bool:
        """Whether a method is the one that `like` names; its learning rate does not matter."""
        like, options = Method.parse_like(self.like), method.options
        own = method.algorithm, method.rounds, options.get("density"), self.index_code_of(method)
        return (*own, options.get("value_code", self.value_code)) == (
            like.algorithm, like.rounds, like.options["density"], like.index_code, like.options["value_code"],
        )  # fmt: skip

    def _identity(self, method: Method) -> tuple[Any, ...]:
        """What two spellings of a method share. An open density is a number only if all methods share it."""
        is_open = method.takes_density and (self.is_at_equal_bytes or len(self.plan.densities) > 1)
        algorithm = method.build(density=self.plan.densities[0], value_code=self.value_code)
        lr = method.lr or (self.plan.lrs[0] if len(self.plan.lrs) == 1 else None)
        how = self.index_code_of(method), self.optimizer_of(method), method.residual_dtype, method.rounds
        return algorithm, lr, is_open, *how


ProtocolT = TypeVar("ProtocolT", bound=Protocol)


def parse_methods(text: str) -> list[Method]:
    """Read methods with commas between them."""
    return [Method.parse(word.strip()) for word in text.split(",") if word.strip()]
