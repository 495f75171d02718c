"""What methods are compared on: gradients of N simulated workers, and numbers that say how good a model is.

A model is a flat vector. R seeds are R rows, and all workers of all seeds give their gradients in one call.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from regtopk.core.options import integer, option
from regtopk.core.worker import Layout
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data.splits import check_split

Quality = dict[str, float | None]  # by the name of what was measured, such as "accuracy"


@dataclass(frozen=True)
class TaskSettings:
    """What is learned, and the sizes of a training.

    Args:
        task: one of `TASKS`.
        split: how examples are divided among workers: iid, sorted[:SHARDS] or dirichlet[:ALPHA].
        num_workers: how many simulated workers, N.
        num_steps: how many steps, T.
        batch_size: examples per worker and step, B.
        data: where the data set is.
        num_layers: blocks of gpt.
        width: of gpt's stream between blocks. Heads of the attention are 64 wide.
        context: characters that gpt sees at once; an example is so many, and the one that follows.
        precision: of the matrix products of deep networks: float32 or bfloat16. Parameters and sums are
            float32.
        device: where to compute: cpu or cuda.
    """

    task: str = "digits"
    split: str = option("iid", lambda name, given: check_split(given))
    num_workers: int = option(0, integer(at_least=1))
    num_steps: int = option(0, integer(at_least=1))
    batch_size: int = option(0, integer(at_least=1))
    data: str = ""
    num_layers: int = 0
    width: int = 0
    context: int = 0
    precision: str = "float32"
    device: str = "cpu"


class Task(ABC):
    """A problem, for some seeds.

    Args:
        config: sizes, split and device.
        seeds: R of them.
        examples: what `load` returned.
    """

    metric: ClassVar[str]  # what `evaluate` gives, and a run is judged by
    metric_words: ClassVar[str] = ""  # the same for people, with its unit; empty: the metric says enough
    is_better_higher: ClassVar[bool]
    num_last: ClassVar[int] = 1  # the final number of a run is the mean of so many of its last evaluations
    has_log_axis: ClassVar[bool] = False  # whether the metric is drawn on a logarithmic axis
    base: ClassVar[str] = "topk"  # the algorithm that differences are taken from
    num_at_once: ClassVar[int | None] = None  # how many seeds are trained at once; None: all
    is_loss_averaged: ClassVar[bool] = False  # whether a record has the mean loss since the record before
    has_own_models: ClassVar[bool] = False  # whether `grads` also takes a model for every worker
    network_settings: ClassVar[tuple[str, ...]] = ()  # which settings of the network one may choose
    defaults: ClassVar[dict[str, Any]]  # of settings that say nothing

    layout: Layout  # which parameter owns which entries
    weights: Sequence[list[float]]  # w_n for each seed

    def __init__(self, config: TaskSettings, seeds: Sequence[int], examples: Any = None) -> None:
        self.config = config
        self.num_workers = config.num_workers
        self.seeds = list(seeds)

    @classmethod
    def check(cls, config: TaskSettings) -> None:
        """Refuse settings that the task does not have."""
        for name in ("num_layers", "width", "context", "precision"):
            value = getattr(config, name)
            if name not in cls.network_settings and value != getattr(TaskSettings, name):
                raise ArgumentError(
                    f"{name} must not be given for {config.task}, whose network is fixed, got {value!r}"
                )

    @classmethod
    def load(cls, config: TaskSettings) -> Any:
        """Read what is learned, once for all seeds; None where nothing is read."""
        if config.data:
            raise ArgumentError(
                f"data must be empty for {config.task}, which reads none, got {config.data!r}"
            )

    @classmethod
    def contents_of(cls, examples: Any) -> Mapping[str, str]:
        """What tells the examples from others of the same name."""
        return {}

    @abstractmethod
    def start(self) -> Tensor:
        """The first models, (R, J)."""

    @abstractmethod
    def grads(self, models: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The workers' gradients, (R, N, J), and their mean loss (R,); the next call may overwrite both.

        Args:
            models: (R, J), or (R, N, J) for a task whose workers may have their own.
            step: which mini-batches.
        """

    @abstractmethod
    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """How good each model is."""
