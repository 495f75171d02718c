"""One rank's part of a real training: its network, its optimizer and the exchange with the other ranks."""

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regtopk.core.algorithm import Algorithm
from regtopk.core.traffic import all_reduce_bytes
from regtopk.distributed import UpdateExchange, attach
from regtopk.distributed.requests.record import PHASES
from regtopk.lab.experiments.optimizers import OPTIMIZERS, Descent
from regtopk.lab.experiments.train_config import TrainConfig
from regtopk.lab.method import Method


class RankTask(ABC):
    """What this rank learns: a network, mini-batches of its own, and numbers that say how good a model is."""

    bucket_mb: ClassVar[float | None] = None  # size of DDP's buckets; None: DDP's own

    @abstractmethod
    def make_network(self, seed: int) -> nn.Module:
        """The network as it starts, on the device: the same on every rank."""

    @abstractmethod
    def order(self, seed: int) -> Tensor:
        """Which examples this rank learns in every step, (T, B)."""

    @abstractmethod
    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        """The mean loss of some examples."""

    @abstractmethod
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """How good a model is. A "loss" among the numbers is recorded in place of the mini-batches' mean."""


class RankTraining:
    """The training of one seed by one method.

    Args:
        task: what is learned.
        config: how.
        method: its learning rate, optimizer and index code, and what is exchanged.
        algorithm: run on what is exchanged; None leaves gradients to DDP as it is.
        seed: of the first weights and of the batches.
    """

    def __init__(
        self, task: RankTask, config: TrainConfig, method: Method, algorithm: Algorithm[Any] | None, seed: int
    ) -> None:
        self.task = task
        self.rounds = method.rounds
        self.network = task.make_network(seed)
        self.num_steps = 0
        self._order = task.order(seed)
        self._descent = Descent.of_network(
            self.network,
            recipe=OPTIMIZERS[config.simulated.optimizer_of(method)],
            lr=method.lr or config.lr,
            num_steps=config.num_steps,
        )
        self._losses: list[Tensor] = []  # since they were last taken
        self._round_s = 0.0  # of the last round
        options: dict[str, Any] = {
            "index_code": config.simulated.index_code_of(method),
            "collective": config.collective,
            "residual_dtype": method.residual_dtype or "float32",
        }
        self.model: nn.Module = self.network
        self.exchange: Any = None
        if self.rounds.has_updates:
            assert algorithm is not None, "updates are exchanged by an algorithm, be it dense"
            outer = None if self.rounds.outer == "none" else self.rounds.make_outer
            self.exchange = UpdateExchange(
                self.network,
                self._descent.optimizer,
                algorithm,
                every=self.rounds.every,
                delay=self.rounds.delay,
                fragments=self.rounds.fragments,
                mix=self.rounds.mix,
                outer=outer,
                **options,
            )
        else:
            self.model = DistributedDataParallel(self.network, bucket_cap_mb=task.bucket_mb)
            if algorithm is not None:
                self.exchange = attach(self.model, algorithm, **options)

    def step(self) -> None:
        """One step of the optimizer, and what the method exchanges after it or before it."""
        rows = self._order[self.num_steps]
        start = time.perf_counter()
        self._descent.optimizer.zero_grad()
        loss = self.task.loss(self.model, rows)
        loss.backward()
        loss = loss.detach()
        self._descent.step(self.num_steps)
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
                self._losses = [self.task.loss(self.network, self._order[0])]
        loss, self._losses = float(torch.stack(self._losses).double().mean()), []
        measured = {"loss": loss, "step_s": self._round_s / self.rounds.every}
        if self.exchange is None:  # DDP's own all_reduce of float32
            vector_bytes = 4 * sum(p.numel() for p in self.network.parameters())
            sent = self.num_steps * all_reduce_bytes(vector_bytes, dist.get_world_size())
            return {**measured, "payload_bytes": self.num_steps * vector_bytes, "sent_bytes": sent}
        total, last = self.exchange.total, self.exchange.last_step
        times = {phase: getattr(last, phase) / self.rounds.every for phase in PHASES}
        return {**measured, "payload_bytes": total.payload_bytes, "sent_bytes": total.sent_bytes, **times}
