"""One rank's part of a real training: its network, its optimizer and the exchange with the other ranks."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regtopk.core.traffic import all_reduce_bytes
from regtopk.distributed import UpdateExchange, attach
from regtopk.distributed.requests.record import PHASES
from regtopk.lab.experiments.compare.config import MethodAt
from regtopk.lab.experiments.ranks.config import TrainConfig
from regtopk.lab.experiments.ranks.tasks import RankTask
from regtopk.lab.experiments.training.optimizers import OPTIMIZERS, Descent
from regtopk.lab.method import Method


class RankTraining:
    """The training of one task by a method; `is_plain_ddp` leaves gradients to DDP as it is."""

    def __init__(
        self, task: RankTask, config: TrainConfig, method: Method, is_plain_ddp: bool = False
    ) -> None:
        self.task, self.network, self.rounds = task, task.network, method.rounds
        self.num_steps = 0
        recipe = OPTIMIZERS[config.optimizer_of(method)]
        self._descent = Descent(self.network, recipe, method.lr or config.lr[0], config.num_steps)
        self._losses: list[Tensor] = []  # since they were last taken
        self._round_s = 0.0  # of the last round
        self.model: nn.Module = self.network
        self.exchange: Any = None
        algorithm = config.build(MethodAt(method, config.densities[0]))
        options: dict[str, Any] = {
            "index_code": config.index_code_of(method),
            "collective": config.collective,
            "residual_dtype": method.residual_dtype or "float32",
        }
        if self.rounds.has_updates:
            self.exchange = UpdateExchange(
                self.network,
                self._descent.optimizer,
                algorithm,
                every=self.rounds.every,
                delay=self.rounds.delay,
                fragments=self.rounds.fragments,
                mix=self.rounds.mix,
                outer=None if self.rounds.outer == "none" else self.rounds.make_outer,
                **options,
            )
        else:
            self.model = DistributedDataParallel(self.network, bucket_cap_mb=task.bucket_mb)
            if not is_plain_ddp:
                self.exchange = attach(self.model, algorithm, **options)

    def step(self) -> None:
        """One step of the optimizer, and what the method exchanges after it or before it."""
        start = time.perf_counter()
        self._descent.optimizer.zero_grad()
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
            sent = self.num_steps * all_reduce_bytes(vector_bytes, dist.get_world_size())
            return {**measured, "payload_bytes": self.num_steps * vector_bytes, "sent_bytes": sent}
        total, last = self.exchange.total, self.exchange.last_step
        times = {phase: getattr(last, phase) / self.rounds.every for phase in PHASES}
        return {**measured, "payload_bytes": total.payload_bytes, "sent_bytes": total.sent_bytes, **times}
