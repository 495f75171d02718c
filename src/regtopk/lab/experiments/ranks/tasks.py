"""What a rank learns: a network, mini-batches of its own, and numbers that say how good a model is."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.data.images import Images, load_images
from regtopk.lab.experiments.data.splits import divide
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.experiments.ranks.config import TrainConfig
from regtopk.lab.experiments.tasks.classification import perceptron
from regtopk.lab.experiments.tasks.deep import Gpt

HIDDEN = (256, 128)  # of the perceptron that reads digits


@dataclass(frozen=True)
class RankTask:
    """What this rank learns, for one seed."""

    network: nn.Module  # as it starts, the same on every rank
    order: Tensor  # (T, B), the examples of every step
    train: Tensor
    targets: Tensor
    evaluate: Callable[[nn.Module], dict[str, float]]
    bucket_mb: float | None = None  # of DDP; None: its own

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """Cross entropy of a step's examples."""
        rows = self.order[step]
        scores = model(self.train[rows]).float()
        return F.cross_entropy(scores.flatten(0, -2), self.targets[rows].flatten())


def save_examples(config: TrainConfig, path: Path) -> None:
    """Read the examples once for all ranks; what cannot be trained on is refused here."""
    examples: Images | Examples
    if config.task == "digits":
        examples = load_images("digits", None, "cpu")
    else:
        examples = Gpt.load(replace(config, device="cpu"))
        divide(examples.labels, config.num_workers, config.split, seed=0)
    torch.save(tuple(examples), path)


def load_task(config: TrainConfig, path: Path, seed: int, device: torch.device) -> RankTask:
    """A task from what `save_examples` wrote; all ranks share the file's memory."""
    saved = torch.load(path, mmap=True, weights_only=True)
    examples = [x.to(device) if isinstance(x, Tensor) else x for x in saved]
    make = _digits if config.task == "digits" else _gpt
    return make(config, examples, seed)


def _digits(config: TrainConfig, saved: list[Any], seed: int) -> RankTask:
    """A perceptron with two hidden layers, on this rank's rows of shuffled batches."""
    digits = Images(*saved)
    torch.manual_seed(seed)
    network = perceptron(digits.train.shape[1], *HIDDEN, 10).to(digits.train.device)

    @torch.no_grad()
    def evaluate(network: nn.Module) -> dict[str, float]:
        """The loss of all training digits, and the percent of the test digits that are read right."""
        loss = F.cross_entropy(network(digits.train), digits.train_labels)
        is_right = network(digits.test).argmax(-1) == digits.test_labels
        return {"loss": float(loss), "accuracy": 100 * float(is_right.float().mean())}

    size = config.batch_size * config.num_workers
    num_batches = len(digits.train) // size  # of a pass; one that would be short is left out
    passes = range(math.ceil(config.num_steps / num_batches))
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(len(digits.train), generator=generator)[: num_batches * size] for _ in passes]
    order = torch.cat(drawn).view(-1, size)[: config.num_steps, dist.get_rank() :: config.num_workers]
    # a small bucket: several of them even in so small a model, as a large one has
    return RankTask(network, order, digits.train, digits.train_labels, evaluate, bucket_mb=0.1)


def _gpt(config: TrainConfig, saved: list[Any], seed: int) -> RankTask:
    """The task gpt of `regtopk compare`: this rank is one of its workers."""
    examples = Examples(*saved)
    task = Gpt(config, [seed], examples)
    network = Gpt.make_network(config, examples, seed).to(examples.train.device)

    def evaluate(network: nn.Module) -> dict[str, float]:
        return task.evaluate(flatten(network).unsqueeze(0))[0]

    order = task.order[:, 0, dist.get_rank()]
    return RankTask(network, order, examples.train, examples.train_targets, evaluate)
