"""The settings of `regtopk train`: a task and its sizes, and a method in the words of `regtopk compare`."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_choice, check_integer
from regtopk.distributed.options import Collective
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare import DEFAULTED, CompareConfig
from regtopk.lab.experiments.compared_task import Defaults
from regtopk.lab.experiments.protocol import Run
from regtopk.lab.experiments.settings import check_device
from regtopk.lab.method import Method
from regtopk.rounds import ADVISED_UPDATES, Rounds

DENSE = Method.parse("dense")
NUM_DIGITS = 1437  # scikit-learn's for training


class TaskDefaults(NamedTuple):
    """What a task uses where the settings say nothing: small enough for processes on one machine."""

    own: Defaults
    record_every: int


DEFAULTS = {
    "digits": TaskDefaults(Defaults(num_workers=2, num_steps=300, batch_size=32, lr=0.4), 10),
    "gpt": TaskDefaults(
        Defaults(
            num_workers=2, num_steps=240, batch_size=4, lr=0.004, optimizer="adamw",
            num_layers=2, width=64, context=64,
        ),
        60,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training; 0 and empty words become the task's own defaults.

    Args:
        task: what to learn: digits (scikit-learn's), or gpt, the next character of a text. Sizes of gpt are
            --set num_layers=2 --set width=64 --set context=64 --set batch_size=4.
        algorithm: what to train with, as NAME[:OPTION=VALUE]... in the words of regtopk compare, such as
            topk:value_code=4bit:exchange=updates:every=2:lr=0.008. Dense DDP is always trained too. If not
            given, regtopk for gradients, topk:value_code=4bit:impute=0.35 for updates.
        exchange: what workers exchange: gradients (by regtopk.attach), or what the optimizer changed: updates
            (by regtopk.UpdateExchange). If not given, what --algorithm says, or else gradients.
        every: with updates, how many steps a worker takes by itself before an exchange; it divides the number
            of steps. If not given, what --algorithm says, or else 1.
        outer: with updates, the optimizer that applies their aggregate: none, sgd, or nesterov as in DiLoCo.
        outer_lr: learning rate of the outer optimizer. If not given, 1 for sgd, 0.7 for nesterov.
        outer_momentum: momentum of the outer optimizer. If not given, 0 for sgd, 0.9 for nesterov.
        delay: with updates, steps from sending one to applying the aggregate, which travels meanwhile.
        fragments: with updates, parts of the model that take turns. If not given, 1.
        density: share of the entries that a worker sends, k / J in (0, 1].
        value_code: how values travel.
        index_code: how indices travel.
        collective: how sparse sums run: auto (computed), all_gather or split.
        optimizer: what follows gradients: sgd, momentum, adam, adamw or sgdw, as in regtopk compare. If not
            given, sgd for digits, adamw for gpt.
        lr: learning rate of the optimizer. If not given, 0.4 for digits, 0.004 for gpt. An lr among the words
            of --algorithm is the method's alone, and dense keeps this one.
        num_workers: how many processes on this machine, N >= 2.
        num_steps: how many steps, T. If not given, 300 for digits, 240 for gpt.
        batch_size: examples per worker and step.
        num_layers: blocks of gpt.
        width: of gpt's stream between blocks.
        context: characters that gpt sees at once.
        data: a text file in UTF-8, for gpt. If not given, torch's own sources.
        num_seeds: how many seeds, from 0 on. A seed fixes the first weights and the batches.
        record_every: steps between records. A record is made where a round of updates ends.
        device: where to compute: cpu (gloo) or cuda (NCCL, one GPU per worker).
    """

    task: str = "digits"
    algorithm: str = ""
    exchange: str = ""
    every: int = 0
    outer: str = ""
    outer_lr: float = 0.0
    outer_momentum: float = 0.0
    delay: int = 0
    fragments: int = 0
    density: float = 0.01
    value_code: str = "float32"
    index_code: str = "elias-fano"
    collective: Collective = "auto"
    optimizer: str = ""
    lr: float = 0.0
    num_workers: int = 2
    num_steps: int = 0
    batch_size: int = 0
    num_layers: int = 0
    width: int = 0
    context: int = 0
    data: str = ""
    num_seeds: int = 1
    record_every: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the settings. Most rules are those of the comparison that simulates the training."""
        check_choice("task", self.task, DEFAULTS)
        self._fill_in_defaults()
        check_integer("num_workers", self.num_workers, at_least=2)
        for name in ("num_seeds", "record_every"):
            check_integer(name, getattr(self, name), at_least=1)
        check_choice("collective", self.collective, ("auto", "all_gather", "split"))
        method = self.method
        self.simulated  # noqa: B018 -- which checks what a comparison has too
        if method.algorithm == "dense" and not method.rounds.has_updates:
            raise ArgumentError(
                "algorithm must not be dense, which is always there, unless it exchanges updates, "
                f"got {method.label!r}"
            )
        if self.task == "digits":
            self._check_digits()
        check_device(self.device)
        if self.device == "cuda" and self.num_workers > torch.cuda.device_count():
            raise ArgumentError(
                f"num_workers must be at most the number of GPUs, {torch.cuda.device_count()}, "
                f"got {self.num_workers}"
            )

    def _fill_in_defaults(self) -> None:
        """Put the defaults in, so that the settings that are recorded are those that are used."""
        own, record_every = DEFAULTS[self.task]
        for name in (*DEFAULTED, "lr"):
            object.__setattr__(self, name, getattr(self, name) or getattr(own, name))
        object.__setattr__(self, "record_every", self.record_every or record_every)
        usual = ADVISED_UPDATES if self.exchange == "updates" else "regtopk"
        object.__setattr__(self, "algorithm", self.algorithm or usual)

    def _check_digits(self) -> None:
        if self.data:
            raise ArgumentError(f"data must be empty for digits, which scikit-learn has, got {self.data!r}")
        if self.batch_size * self.num_workers > NUM_DIGITS:
            raise ArgumentError(
                f"batch_size must be at most {NUM_DIGITS // self.num_workers} ({NUM_DIGITS} training digits, "
                f"{self.num_workers} workers), got {self.batch_size}"
            )

    @cached_property
    def method(self) -> Method:
        """The algorithm's words and the options that say what is exchanged.

        Raises:
            ArgumentError: an option contradicts a word, or the words make no method.
        """
        read = Method.read(self.algorithm)
        named, label = dict(read.words), self.algorithm
        for name in (name for name in Rounds._fields if hasattr(self, name)):
            option, said = getattr(self, name), read.options.get(name, getattr(read.rounds, name))
            if not option or option == said:
                continue
            if name in named:
                raise ArgumentError(
                    f"{name} must be the same as option and as word of the algorithm, got {option} and "
                    f"{self.algorithm!r}"
                )
            label += f":{name}={option}"
        return Method.parse(label)

    @cached_property
    def simulated(self) -> CompareConfig:
        """The comparison that trains the same in the simulator; for gpt its models end with the same bits."""
        same: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("task", "value_code", "index_code", "data", "num_seeds", "device", *DEFAULTED)
        }
        lr, densities = (self.lr,), (self.density,)
        return CompareConfig(**same, algorithms=self.method.label, lr=lr, densities=densities)

    def build(self, method: Method) -> Algorithm[Any]:
        """The algorithm of a method, with those of the settings that it takes."""
        return self.simulated.build(Run(method, self.density))

    def record_steps(self, method: Method) -> list[int]:
        """After which steps a record is made: at both ends, and every few, where a round ends."""
        every = method.rounds.every
        wanted = (*range(0, self.num_steps, self.record_every), self.num_steps)
        return sorted({step - step % every for step in wanted})
