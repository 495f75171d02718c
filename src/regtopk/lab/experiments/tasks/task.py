"""What methods are compared on: gradients of N simulated workers, and numbers that say how good a model is.

A model is a flat vector. R seeds are R rows, and all workers of all seeds give their gradients in one call.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regtopk.core.options import check_integer, integer, one_of, option, within
from regtopk.core.worker import Layout
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.data.splits import batch_order, divide, weights_of
from regtopk.lab.experiments.data.text import TOKENS
from regtopk.lab.experiments.networks.flat import flatten, layout_of

MOST_DRAWS = 2**30  # of examples, which are drawn before a training
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TaskSettings:
    """What is learned, and the sizes of a training.

    Args:
        task: one of `TASKS`.
        split: how examples are divided among workers: iid, sorted[:SHARDS] or dirichlet[:ALPHA].
        num_workers: how many simulated workers, N.
        num_steps: how many steps, T.
        batch_size: examples per worker and step, B.
        data: where the data set is; for gpt a text file, or enwik8 after regtopk fetch enwik8.
        tokens: what gpt reads a text as: characters, bytes, or gpt2, the pieces of words that GPT-2 reads.
        num_layers: blocks of gpt.
        width: of gpt's stream between blocks. Heads of the attention are 64 wide.
        context: tokens that gpt sees at once; an example is so many, and the one that follows.
        precision: of the matrix products of deep networks: float32 or bfloat16. Parameters and sums are
            float32.
        bad_worker: what the last worker sends is so many times what it should be.
        device: where to compute: cpu or cuda.
    """

    task: str = "digits"
    split: str = "iid"
    num_workers: int = option(0, integer(at_least=1))
    num_steps: int = option(0, integer(at_least=1))
    batch_size: int = option(0, integer(at_least=1))
    data: str = ""
    tokens: str = option("characters", one_of(*TOKENS))
    num_layers: int = option(0, integer(at_least=0))
    width: int = option(0, integer(at_least=0))
    context: int = option(0, integer(at_least=0))
    precision: str = option("float32", one_of(*DTYPES))
    bad_worker: float = option(1.0, within("(0, inf)"))
    device: str = "cpu"


class Task(ABC):
    """What is learned, for R seeds, from the examples that `load` returned."""

    metric: ClassVar[str]  # what `evaluate` gives, and a run is judged by
    metric_words: ClassVar[str] = ""  # the same for people, with its unit; empty: the metric says enough
    is_better_higher: ClassVar[bool]
    has_blocks: ClassVar[bool] = False  # whether the model has matrices for Muon
    num_last: ClassVar[int] = 1  # the final number of a run is the mean of so many of its last evaluations
    base: ClassVar[str] = "topk"  # the algorithm that differences are taken from
    num_at_once: ClassVar[int | None] = None  # how many seeds are trained at once; None: all
    is_loss_averaged: ClassVar[bool] = False  # whether a record has the mean loss since the record before
    network_settings: ClassVar[tuple[str, ...]] = ()  # which settings of the network one may choose
    contents: ClassVar[str] = "examples"  # what a record calls the hash of the examples
    defaults: ClassVar[dict[str, Any]]  # of settings that say nothing

    weights: list[list[float]]  # w_n for each seed
    layout: Layout
    _start: Tensor

    @abstractmethod
    def __init__(self, config: TaskSettings, seeds: Sequence[int], examples: Examples) -> None:
        self.config, self.seeds, self.examples = config, list(seeds), examples
        self.num_workers = config.num_workers

    @classmethod
    def check(cls, config: TaskSettings) -> None:
        """Refuse settings that the task does not have."""
        for name in ("tokens", "num_layers", "width", "context", "precision"):
            value = getattr(config, name)
            if name not in cls.network_settings and value != getattr(TaskSettings, name):
                raise ArgumentError(f"{name} is fixed for {config.task}: do not give it, got {value!r}")
        num_draws = config.num_steps * config.num_workers * config.batch_size
        check_integer("num_steps * num_workers * batch_size", num_draws, at_most=MOST_DRAWS)

    @classmethod
    @abstractmethod
    def load(cls, config: TaskSettings) -> Examples:
        """Read what is learned, once for all seeds."""

    def start(self) -> Tensor:
        """The first models, (R, J)."""
        return self._start.to(self.config.device, copy=True)

    @abstractmethod
    def grads(self, models: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The workers' gradients, (R, N, J), and their mean loss (R,); the next call may overwrite both.

        Models are (R, J), or (R, N, J) where workers have their own. The step says which mini-batches.
        """

    @abstractmethod
    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """How good each model is."""


class NetworkTask(Task):
    """A network that learns from examples: seeds draw first weights, shards and batches."""

    def __init__(self, config: TaskSettings, seeds: Sequence[int], examples: Examples) -> None:
        super().__init__(config, seeds, examples)
        shards = [divide(examples.labels, config.num_workers, config.split, seed) for seed in seeds]
        orders = [
            batch_order(own, config.batch_size, config.num_steps, seed)
            for own, seed in zip(shards, seeds, strict=True)
        ]
        self.order = torch.stack(orders, 1).to(config.device)  # (T, R, N, B)
        self.weights = [weights_of(own, config.split) for own in shards]
        self._weights = torch.tensor(self.weights, device=config.device)
        self._start = torch.stack([flatten(self.make_network(config, examples, seed)) for seed in seeds])
        self.network = self.make_network(config, examples, seed=0)
        self.layout = layout_of(self.network)

    @classmethod
    def make_network(cls, config: TaskSettings, examples: Examples, seed: int) -> nn.Module:
        """The network as it starts."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls.draw_network(config, examples)

    @classmethod
    @abstractmethod
    def draw_network(cls, config: TaskSettings, examples: Examples) -> nn.Module:
        """The network, its weights drawn by torch's generator."""

    def grads(self, models: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Of the mini-batches of a step."""
        grads, losses = self.grads_at(models, self.order[step])
        return grads, (self._weights * losses).sum(-1)

    @abstractmethod
    def grads_at(self, models: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients (R, N, J) and losses (R, N) of some examples (R, N, B)."""
