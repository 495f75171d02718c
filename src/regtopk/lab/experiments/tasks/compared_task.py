"""What a task of `regtopk compare` says about itself beyond gradients and quality."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.protocol import Protocol
from regtopk.lab.experiments.tasks.task import Task


class Defaults(NamedTuple):
    """What a comparison on a task uses where its settings say nothing; 0: the task has no such setting."""

    num_workers: int
    num_steps: int
    batch_size: int
    lr: float
    optimizer: str = "sgd"
    num_layers: int = 0
    width: int = 0
    context: int = 0


class ComparedTask(Task):
    """A task that methods are compared on.

    Args:
        config: sizes, split and device.
        seeds: R of them.
        examples: what `load` returned.
    """

    metric: ClassVar[str]  # what `evaluate` gives, and a run is judged by
    metric_words: ClassVar[str] = ""  # the same for people, with its unit; empty: the metric says enough
    is_better_higher: ClassVar[bool]
    has_log_axis: ClassVar[bool] = False  # whether the metric is drawn on a logarithmic axis
    base: ClassVar[str] = "topk"  # the algorithm that differences are taken from
    defaults: ClassVar[Defaults]

    def __init__(self, config: Protocol, seeds: Sequence[int], examples: Any = None) -> None:
        self.config = config
        self.num_workers = config.num_workers
        self.seeds = list(seeds)

    @classmethod
    def load(cls, config: Any) -> Any:
        """Read what is learned, once for all seeds; None where nothing is read.

        Raises:
            ArgumentError: there is no such data, or the task takes none.
        """
        if config.data:
            raise ArgumentError(
                f"data must be empty for {config.task}, which reads none, got {config.data!r}"
            )

    @classmethod
    def contents_of(cls, examples: Any) -> Mapping[str, str]:
        """What tells the examples from others of the same name."""
        return {}
