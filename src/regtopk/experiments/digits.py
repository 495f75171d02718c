"""Training on scikit-learn's digits with DistributedDataParallel: what every rank does."""

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

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

NUM_TRAIN, NUM_TEST = 1437, 360
HIDDEN = (256, 128)
BUCKET_MB = 0.1  # several DDP buckets even in so small a model, as a large one has


class Digits(NamedTuple):
    """Images (n, 64) with entries in 0..1, and labels; the last are kept for the test."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits(device: torch.device) -> Digits:
    """scikit-learn's digits, shuffled once and for all."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(images, dtype=torch.float32) / 16)[order].to(device)
    y = torch.tensor(labels)[order].to(device)
    return Digits(x[:NUM_TRAIN], y[:NUM_TRAIN], x[NUM_TRAIN:], y[NUM_TRAIN:])


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


class Training:
    """One model, its optimizer and its batches.

    Args:
        digits: the same on every rank.
        algorithm: attached to the model; None trains dense, with DDP as it is.
        scope: what is selected over.
        batch_size: digits a worker and step.
        lr: learning step length.
        seed: of the first weights and of the batches.
    """

    def __init__(
        self,
        digits: Digits,
        algorithm: Algorithm[Any] | None,
        *,
        scope: Scope,
        batch_size: int,
        lr: float,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        network = make_network(digits.images.shape[1]).to(digits.images.device)
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
        F.cross_entropy(self.model(self.digits.images[rows]), self.digits.labels[rows]).backward()
        self.optimizer.step()
        if self.digits.images.is_cuda:
            torch.cuda.synchronize()
        self.step_s = time.perf_counter() - start
        self.num_steps += 1

    def measure(self) -> dict[str, float]:
        """Training loss, test accuracy, this rank's bytes so far, and the times of its last step."""
        network, digits = self.model.module, self.digits
        with torch.no_grad():
            loss = F.cross_entropy(network(digits.images), digits.labels)
            is_right = network(digits.test_images).argmax(-1) == digits.test_labels
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
