"""Training on scikit-learn's digits with DistributedDataParallel: what every rank does."""

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from regtopk.core.algorithm import Algorithm
from regtopk.core.traffic import all_reduce_bytes
from regtopk.distributed import attach
from regtopk.distributed.options import Scope
from regtopk.distributed.record import PHASES
from regtopk.experiments.images import Images

NUM_TRAIN = 1437
HIDDEN = (256, 128)
BUCKET_MB = 0.1  # several DDP buckets even in so small a model, as a large one has


def batches(batch_size: int, seed: int) -> Iterator[Tensor]:
    """This rank's rows of every step's batch, epoch after epoch; a batch that would be short is left out."""
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    whole = batch_size * num_workers
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(NUM_TRAIN, generator=generator)
        for start in range(0, NUM_TRAIN - whole + 1, whole):
            yield order[start : start + whole][rank::num_workers]


def make_network(num_inputs: int) -> nn.Module:
    """A perceptron with two hidden layers."""
    sizes = (num_inputs, *HIDDEN)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 10))


class RankTraining:
    """One rank's part of a training: its model, its optimizer and its batches.

    Args:
        digits: the same on every rank.
        algorithm: attached to the model; None trains dense, with DDP as it is.
        scope: what is selected over.
        batch_size: digits per worker and step.
        lr: learning rate.
        seed: of the first weights and of the batches.
    """

    def __init__(
        self,
        digits: Images,
        algorithm: Algorithm[Any] | None,
        *,
        scope: Scope,
        batch_size: int,
        lr: float,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        network = make_network(digits.train.shape[1]).to(digits.train.device)
        self.model = DistributedDataParallel(network, bucket_cap_mb=BUCKET_MB)
        self.exchange = None if algorithm is None else attach(self.model, algorithm, scope=scope)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.digits = digits
        self.batches = batches(batch_size, seed)
        self.num_steps = 0
        self.step_s = 0.0  # the last step

    def step(self) -> None:
        """One step of SGD."""
        rows = next(self.batches)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.digits.train[rows]), self.digits.train_labels[rows]).backward()
        self.optimizer.step()
        if self.digits.train.is_cuda:
            torch.cuda.synchronize()
        self.step_s = time.perf_counter() - start
        self.num_steps += 1

    def measure(self) -> dict[str, float]:
        """Training loss, test accuracy, this rank's bytes so far, and the times of its last step."""
        network, digits = self.model.module, self.digits
        with torch.no_grad():
            loss = F.cross_entropy(network(digits.train), digits.train_labels)
            is_right = network(digits.test).argmax(-1) == digits.test_labels
        measured = {
            "loss": float(loss),
            "accuracy": 100 * float(is_right.float().mean()),
            "step_s": self.step_s,
        }
        if self.exchange is None:  # DDP's own all_reduce of float32
            vector_bytes = 4 * sum(p.numel() for p in network.parameters())
            sent = self.num_steps * all_reduce_bytes(vector_bytes, dist.get_world_size())
            return {**measured, "payload_bytes": self.num_steps * vector_bytes, "sent_bytes": sent}
        total, last = self.exchange.total, self.exchange.last_step
        times = {phase: getattr(last, phase) for phase in PHASES}
        return {**measured, "payload_bytes": total.payload_bytes, "sent_bytes": total.sent_bytes, **times}
