"""Training by real processes: a method, and dense beside it, on digits or on a text.

Every rank trains a network on its own mini-batches. Dense is DistributedDataParallel as it is. The method is
the same with `regtopk.attach` where gradients are exchanged, and a plain model with `regtopk.UpdateExchange`
where updates are.
"""

import gc
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regtopk.core.traffic import all_reduce_bytes
from regtopk.distributed import UpdateExchange, attach
from regtopk.distributed.requests.record import PHASES
from regtopk.distributed.steps.handshake import refuse_oracles
from regtopk.distributed.updates.exchange import TIMES
from regtopk.lab.experiments.compare.comparison import exchanged
from regtopk.lab.experiments.compare.config import MethodAt
from regtopk.lab.experiments.experiment import ShowProgress, WholeExperiment
from regtopk.lab.experiments.ranks.config import TrainConfig
from regtopk.lab.experiments.ranks.results import panels, summarise
from regtopk.lab.experiments.ranks.tasks import RankTask, load_task, save_examples
from regtopk.lab.experiments.training.optimizers import Descent, recipe_of
from regtopk.lab.launch import Emit, join_group, launch
from regtopk.lab.method import Method
from regtopk.lab.runs import Record


def run(config: TrainConfig, progress: ShowProgress) -> Iterator[Record]:
    """Train in new processes; yield what they measured, every few steps."""
    for method in config.methods:
        refuse_oracles(config.build(MethodAt(method, config.densities[0])))
    num_records = sum(len(config.record_steps(method)) for method in config.trained)
    with tempfile.TemporaryDirectory() as folder:
        examples = Path(folder) / "examples.pt"
        save_examples(config, examples)
        for done, record in enumerate(launch(train_rank, config.num_workers, config, examples), start=1):
            progress(done / num_records)
            yield record


# What follows runs on every rank.


class RankTraining:
    """The training of one task by a method; `is_plain` leaves gradients to DDP as it is."""

    def __init__(self, task: RankTask, config: TrainConfig, method: Method, is_plain: bool = False) -> None:
        self.task, self.network, self.rounds = task, task.network, method.rounds
        self.num_steps = 0
        lr = method.lr or config.lr[0]
        self._descent = Descent(self.network, recipe_of(method), lr, config.num_steps)
        self._losses: list[Tensor] = []  # since they were last taken
        self._round_s = 0.0  # of the last round
        self.model: nn.Module = self.network
        self.exchange: Any = None
        algorithm = config.build(MethodAt(method, config.densities[0]))
        options: dict[str, Any] = {
            "index_code": method.index_code,
            "collective": config.collective,
            "residual_dtype": method.residual_dtype,
        }
        if self.rounds.has_updates:
            options |= {name: getattr(self.rounds, name) for name in TIMES}
            if self.rounds.by_worker:
                options |= {"every": self.rounds.by_worker[dist.get_rank()], "weight": "steps"}
            options["outer"] = None if self.rounds.outer == "none" else self.rounds.make_outer
            self.exchange = UpdateExchange(self.network, self._descent.optimizers, algorithm, **options)
        else:
            self.model = DistributedDataParallel(self.network, bucket_cap_mb=task.bucket_mb)
            if not is_plain:
                self.exchange = attach(self.model, algorithm, **options)

    def step(self) -> None:
        """One step of the optimizer, and what the method exchanges after it or before it."""
        if not self.rounds.makes_step(dist.get_rank(), self.num_steps):
            self.num_steps += 1
            return
        start = time.perf_counter()
        self.network.zero_grad()
        loss = self.task.loss(self.model, self.num_steps)
        loss.backward()
        self._descent.step(self.num_steps)
        loss = loss.detach()
        if loss.is_cuda:
            torch.cuda.synchronize()
        step_s = time.perf_counter() - start
        if self.exchange is not None:  # for the next exchange of adaptive algorithms
            self.exchange.report(loss=float(loss), time_s=step_s)
        self._round_s = step_s + (self._round_s if self.num_steps % self.rounds.every else 0.0)
        self._losses.append(loss)
        self.num_steps += 1

    def evaluate(self) -> dict[str, float]:
        """How good the model is that all ranks agree on."""
        if not self.rounds.has_updates:
            return self.task.evaluate(self.network)
        with self.exchange.agreed():
            return self.task.evaluate(self.network)

    def measure(self) -> dict[str, float]:
        """This rank's mean loss since the last call, its bytes so far, and a step's times in the last round.

        Before the first step the loss is that of the first mini-batch.
        """
        if not self._losses:
            with torch.no_grad():
                self._losses = [self.task.loss(self.network, 0)]
        loss, self._losses = float(torch.stack(self._losses).double().mean()), []
        measured = {"loss": loss, "step_s": self._round_s / self.rounds.every}
        if self.exchange is None:  # DDP's own all_reduce of float32
            vector_bytes = 4 * sum(p.numel() for p in self.network.parameters())
            moved = self.num_steps * all_reduce_bytes(vector_bytes, dist.get_world_size())
            sizes = {"payload_bytes": self.num_steps * vector_bytes, "sent_bytes": moved}
            return {**measured, **sizes, "received_bytes": moved}
        total, last = self.exchange.total, self.exchange.last_step
        times = {phase: getattr(last, phase) / self.rounds.every for phase in PHASES}
        sizes = {name: getattr(total, name) for name in ("payload_bytes", "sent_bytes", "received_bytes")}
        return {**measured, **sizes, **times}


def train_rank(emit: Emit, config: TrainConfig, examples: Path) -> None:
    """Train with dense and with each method; rank 0 emits the records."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.num_workers))
    device = torch.device(config.device)
    if config.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    join_group("nccl" if config.device == "cuda" else "gloo")
    for method in config.trained:
        _train(emit, config, method, examples, device)
    gc.collect()  # the models go first: what still holds the group would keep its threads into Python's exit
    dist.destroy_process_group()


def _train(emit: Emit, config: TrainConfig, method: Method, examples: Path, device: torch.device) -> None:
    tasks = [load_task(config, examples, seed, device) for seed in config.chosen_seeds]
    is_plain = method is config.trained[0]
    trainings = [RankTraining(task, config, method, is_plain) for task in tasks]
    for step in range(config.num_steps + 1):
        if step in config.record_steps(method):
            record = _make_record(config, method, trainings)
            if dist.get_rank() == 0:
                emit(record)
        if step < config.num_steps:
            for training in trainings:
                training.step()


def _make_record(config: TrainConfig, method: Method, trainings: Sequence[RankTraining]) -> Record:
    """How good every seed is, on rank 0; losses as means over ranks; bytes and times over seeds too."""
    qualities = [t.evaluate() for t in trainings] if dist.get_rank() == 0 else []
    measured = [training.measure() for training in trainings]
    names = list(measured[0])
    of_seeds = [[m[name] for name in names] for m in measured]
    means = torch.tensor(of_seeds, dtype=torch.float64, device=trainings[0].task.train.device)
    means /= dist.get_world_size()
    dist.all_reduce(means)
    by_name = dict(zip(names, means.T.cpu(), strict=True))
    return {
        "method": method.label,
        "step": trainings[0].num_steps,
        "lr": method.lr or config.lr[0],
        **exchanged(method),
        **{name: float(own.mean()) for name, own in by_name.items()},
        "loss": by_name["loss"].tolist(),
        **{name: [quality[name] for quality in qualities] for name in next(iter(qualities), {})},
    }


TRAIN = WholeExperiment(
    name="train",
    title="Real training: processes, messages and bytes",
    about="Processes on this machine train a network: by DistributedDataParallel as it is (dense), and by "
    "each method. Bytes are what each worker sends: the method's messages, counted, and a ring all_reduce "
    "for dense. Times are medians.",
    config=TrainConfig,
    run=run,
    summarise=summarise,
    panels=panels,
)
