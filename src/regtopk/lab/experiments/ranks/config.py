"""The settings of `regtopk train`: those of a comparison, which real processes then run."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from regtopk.core.options import check_choice, integer, one_of, option
from regtopk.distributed.options import Collective
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.settings import check_device
from regtopk.lab.method import Method
from regtopk.rounds import ADVISED_UPDATES

MOST_RANKS = 256  # processes on one machine
NUM_DIGITS = 1437  # scikit-learn's for training
# settings that only the simulator has
SIMULATED = (
    "split", "like", "like_received", "bytes_per_step", "received_bytes_per_step", "precision",
    "num_search_runs", "bad_worker",
)  # fmt: skip

# of a task: sizes small enough for processes on one machine, and what docs/which-method.md advises
DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": dict(
        num_workers=2, num_steps=300, batch_size=32, lr=(0.4,), num_evaluations=30,
        algorithms="consensus:value_code=4bit",
    ),
    "gpt": dict(
        num_workers=2, num_steps=240, batch_size=4, lr=(0.004,), num_evaluations=4, optimizer="adamw",
        num_layers=2, width=64, context=64,
        algorithms=f"{ADVISED_UPDATES}:exchange=updates:every=2:fragments=2",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class TrainConfig(CompareConfig):
    """Settings of a training; 0 and empty words become the task's own defaults.

    Args:
        task: what to learn: digits (scikit-learn's), or gpt, the next token of a text. Sizes of gpt are
            --set num_layers=2 --set width=64 --set context=64 --set batch_size=4.
        algorithms: methods in the words of regtopk compare, such as topk:lr=0.008, with commas between them;
            if not given, what we advise. Dense DDP is always trained too.
        densities: share of the entries that a worker sends, k / J in (0, 1].
        lr: learning rate of the optimizer. If not given, 0.4 for digits, 0.004 for gpt. An lr among the words
            of a method is the method's alone, and dense keeps this one.
        num_workers: how many processes on this machine, N >= 2.
        num_steps: how many steps, T. If not given, 300 for digits, 240 for gpt.
        data: a text file in UTF-8 for gpt, or enwik8, once fetched. If not given, torch's own sources.
        collective: how sparse sums run: auto (computed), all_gather or split.
        device: where to compute: cpu (gloo) or cuda (NCCL, one GPU per worker).
    """

    num_workers: int = option(0, integer(at_least=2, at_most=MOST_RANKS))
    num_evaluations: int = option(0, integer(at_least=1))
    collective: Collective = option("auto", one_of("auto", "all_gather", "split"))

    def __post_init__(self) -> None:
        check_choice("task", self.task, DEFAULTS)
        super().__post_init__()
        for name in SIMULATED:
            given = getattr(self, name)
            if given != getattr(CompareConfig, name):
                raise ArgumentError(f"{name} is a setting of regtopk compare alone, got {given!r}")
        if len(self.lr) > 1 or len(self.densities) > 1:
            raise ArgumentError(f"lr and density must be one number each, got {self.lr}, {self.densities}")
        if "|" in self.algorithms:
            raise ArgumentError(f"options of a training must have one value each, got {self.algorithms!r}")
        if any(method.algorithm == "dense" and not method.rounds.has_updates for method in self.methods):
            raise ArgumentError(
                f"algorithms must not include dense, which is always there, got {self.algorithms!r}"
            )
        if self.task == "digits" and self.data:
            raise ArgumentError(f"data must be empty for digits, which scikit-learn has, got {self.data!r}")
        check_device("device", self.device)
        most, num_gpus = NUM_DIGITS // self.num_workers, torch.cuda.device_count()
        if self.task == "digits" and self.batch_size > most:
            raise ArgumentError(
                f"batch_size must be at most {most} for {NUM_DIGITS} digits, got {self.batch_size}"
            )
        if self.device == "cuda" and self.num_workers > num_gpus:
            raise ArgumentError(
                f"num_workers must be at most {num_gpus}, the GPUs here, got {self.num_workers}"
            )

    @property
    def defaults(self) -> dict[str, Any]:
        """Of the task, on ranks."""
        return DEFAULTS[self.task]

    @cached_property
    def trained(self) -> list[Method]:
        """Dense, which is left to DDP, and the methods."""
        return [self.complete(Method.parse("dense")), *self.methods]

    def record_steps(self, method: Method) -> list[int]:
        """After which steps a record is made: at both ends, and every few, where a round ends."""
        return sorted({step - step % method.rounds.every for step in self.stops})
