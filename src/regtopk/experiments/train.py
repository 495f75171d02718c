"""Training by real processes: scikit-learn's digits, DistributedDataParallel, with an algorithm and dense.

Every rank trains a small network on its own rows of the same shuffled batches. Dense is DDP as it is, without
a hook; the algorithm is the same script with `regtopk.attach`.
"""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from regtopk.core.algorithm import Algorithm, check_density
from regtopk.core.codes import check_value_code
from regtopk.core.options import check_choice, check_integer, check_positive
from regtopk.distributed.handshake import refuse_oracles
from regtopk.distributed.options import Scope
from regtopk.distributed.record import PHASES
from regtopk.errors import ArgumentError, MissingExtraError
from regtopk.experiments.digits import NUM_TRAIN, RankTraining
from regtopk.experiments.experiment import Progress, Summary, WholeExperiment
from regtopk.experiments.images import load_images
from regtopk.experiments.launch import emit, join_group, launch
from regtopk.experiments.settings import check_device
from regtopk.method import Method
from regtopk.rounds import GRADIENTS
from regtopk.runs import Panel, Record

TARGET = 95.0  # percent of the test digits: what "sent until" counts up to


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training.

    Args:
        algorithm: what to train with, as NAME[:OPTION=VALUE]...; dense is trained too.
        density: share of the entries that a worker sends, k / J in (0, 1].
        value_code: how values travel.
        scope: select entries over the whole model, or over each DDP bucket: model or bucket.
        dataset: what to learn: digits.
        num_workers: how many processes on this machine, N >= 2.
        num_steps: how many steps, T.
        batch_size: digits per worker and step.
        lr: learning rate, > 0.
        num_seeds: how many seeds, from 0 on. A seed fixes the first weights and the batches.
        record_every: steps between records.
        device: where to compute: cpu (gloo) or cuda (NCCL, one GPU per worker).
    """

    algorithm: str = "regtopk"
    density: float = 0.01
    value_code: str = "float32"
    scope: Scope = "model"
    dataset: str = "digits"
    num_workers: int = 2
    num_steps: int = 300
    batch_size: int = 32
    lr: float = 0.4
    num_seeds: int = 1
    record_every: int = 10
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_density(self.density)
        check_value_code(self.value_code)
        method = Method.parse(self.algorithm)
        if method.rounds != GRADIENTS or method.lr or method.index_code or method.optimizer:
            raise ArgumentError(
                "algorithm must have options of its own alone here, no lr, index_code, optimizer, exchange, "
                f"got {self.algorithm!r}"
            )
        if make_algorithm(self).name == "dense":
            raise ArgumentError(f"algorithm must not be dense, which is always there, got {self.algorithm!r}")
        check_choice("scope", self.scope, ("model", "bucket"))
        check_choice("dataset", self.dataset, ("digits",))
        for name in ("num_steps", "batch_size", "num_seeds", "record_every"):
            check_integer(name, getattr(self, name), at_least=1)
        check_integer("num_workers", self.num_workers, at_least=2)
        if self.batch_size * self.num_workers > NUM_TRAIN:
            raise ArgumentError(
                f"batch_size must be at most {NUM_TRAIN // self.num_workers} ({NUM_TRAIN} training digits, "
                f"{self.num_workers} workers), got {self.batch_size}"
            )
        check_positive("lr", self.lr)
        check_device(self.device)
        if self.device == "cuda" and self.num_workers > torch.cuda.device_count():
            raise ArgumentError(
                f"num_workers must be at most the number of GPUs, {torch.cuda.device_count()}, "
                f"got {self.num_workers}"
            )


def make_algorithm(config: TrainConfig) -> Algorithm[Any]:
    """The algorithm, with those of the settings that it takes."""
    return Method.parse(config.algorithm).build(density=config.density, value_code=config.value_code)


def run(config: TrainConfig, progress: Progress) -> Iterator[Record]:
    """Train in new processes; yield what they measured, every few steps."""
    refuse_oracles(make_algorithm(config))
    if find_spec("sklearn") is None:
        raise MissingExtraError("the digits come with scikit-learn: pip install 'regtopk[experiments]'")
    records = launch(train_rank, asdict(config), config.num_workers)
    num_records = 2 * len(record_steps(config))
    for done, record in enumerate(records, start=1):
        progress(done / num_records)
        yield record


def record_steps(config: TrainConfig) -> list[int]:
    """After which steps a record is made: before the first, every few, and after the last."""
    return sorted({*range(0, config.num_steps, config.record_every), config.num_steps})


# What follows runs on every rank.


def train_rank(settings: Mapping[str, Any]) -> None:
    """Train with both methods; rank 0 emits the records."""
    config = TrainConfig(**settings)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.num_workers))
    device = torch.device(config.device)
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    join_group("nccl" if config.device == "cuda" else "gloo")
    train_both(config, device)
    gc.collect()  # the models go first: what still holds the group would keep its threads into Python's exit
    dist.destroy_process_group()


def train_both(config: TrainConfig, device: torch.device) -> None:
    """Dense, then the algorithm, on the group that there is."""
    digits = load_images("digits", None, device)
    for algorithm in (None, make_algorithm(config)):
        method = "dense" if algorithm is None else algorithm.name
        trainings = [
            RankTraining(
                digits,
                algorithm,
                scope=config.scope,
                batch_size=config.batch_size,
                lr=config.lr,
                seed=seed,
            )
            for seed in range(config.num_seeds)
        ]
        for step in range(config.num_steps + 1):
            if step in record_steps(config):
                record = make_record(method, step, [training.measure() for training in trainings], device)
                if dist.get_rank() == 0:
                    emit(record)
            if step < config.num_steps:
                for training in trainings:
                    training.step()


def make_record(
    method: str, step: int, measured: Sequence[Mapping[str, float]], device: torch.device
) -> Record:
    """Loss and accuracy of every seed; bytes and times as means over seeds and ranks."""
    names = [name for name in measured[0] if name not in ("loss", "accuracy")]
    means = torch.tensor([[m[name] for name in names] for m in measured], dtype=torch.float64).mean(0)
    means = means.to(device) / dist.get_world_size()
    dist.all_reduce(means)
    return {
        "method": method,
        "step": step,
        "loss": [m["loss"] for m in measured],
        "accuracy": [m["accuracy"] for m in measured],
        **dict(zip(names, means.tolist(), strict=True)),
    }


# The table and the figure.


def summarise(config: TrainConfig, records: Sequence[Record]) -> Summary:
    """Where each method ended, what it sent, and where its time went."""
    final = {record["method"]: record for record in records}
    own = make_algorithm(config).name
    sent = {method: record["sent_bytes"] for method, record in final.items()}
    measures = {
        "test_accuracy": {method: median(record["accuracy"]) for method, record in final.items()},
        "training_loss": {method: median(record["loss"]) for method, record in final.items()},
        "sent_bytes": sent,
        "sent_bytes_a_step": {method: total / config.num_steps for method, total in sent.items()},
        "times_less_than_dense": {own: sent["dense"] / sent[own]},
        "sent_bytes_until_target": {method: _sent_until_target(method, records) for method in final},
        "step_s": {method: _median_of_steps("step_s", method, records) for method in final},
        **{phase: {own: _median_of_steps(phase, own, records)} for phase in PHASES},
    }
    return {**measures, "target_accuracy": TARGET, "table": _table(measures)}


def _median_of_steps(name: str, method: str, records: Sequence[Record]) -> float:
    return float(median(r[name] for r in records if r["method"] == method and r["step"] > 0))


def _sent_until_target(method: str, records: Sequence[Record]) -> float | None:
    reached = (r for r in records if r["method"] == method and median(r["accuracy"]) >= TARGET)
    return next((record["sent_bytes"] for record in reached), None)


def _table(measures: Mapping[str, Mapping[str, float | None]]) -> list[dict[str, Any]]:
    rows = [
        ("digits read right, %", "test_accuracy", 1.0),
        ("training loss", "training_loss", 1.0),
        ("sent a step, kB", "sent_bytes_a_step", 1e-3),
        ("sent in all, MB", "sent_bytes", 1e-6),
        ("times less sent", "times_less_than_dense", 1.0),
        (f"sent until {TARGET:.0f} %, MB", "sent_bytes_until_target", 1e-6),
        ("step, ms", "step_s", 1e3),
        *((f"of which {phase[:-2]}", phase, 1e3) for phase in PHASES),
    ]
    return [
        {"measure": label, **{method: x and unit * x for method, x in measures[name].items()}}
        for label, name, unit in rows
    ]


def panels(config: TrainConfig) -> Sequence[Panel]:
    """Accuracy and loss, against steps and against bytes sent."""
    accuracy = Panel("Accuracy, by steps", "step", "accuracy", "step", "test digits read right, %")
    loss = replace(accuracy, title="Loss, by steps", y="loss", y_label="training loss", log_y=True)
    bytes_sent: dict[str, Any] = {"x": "sent_bytes", "x_label": "bytes sent by a worker", "log_x": True}
    return (
        accuracy,
        replace(accuracy, title="Accuracy, by bytes", **bytes_sent),
        loss,
        replace(loss, title="Loss, by bytes", **bytes_sent),
    )


TRAIN = WholeExperiment(
    name="train",
    title="Real training: processes, messages and bytes",
    about=(
        "Processes on this machine, joined by torch.distributed, train a "
        "small network on scikit-learn's digits: once with DistributedDataParallel as it is (dense), once "
        "with one more line, regtopk.attach. Bytes are what each worker sends: the algorithm's messages, "
        "counted, and a ring all_reduce for dense. Times are medians; here processes talk through memory, so "
        "they do not show what sending less is worth on a network."
    ),
    config=TrainConfig,
    run=run,
    summarise=summarise,
    panels=panels,
)
