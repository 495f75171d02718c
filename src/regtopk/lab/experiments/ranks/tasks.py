"""What a rank learns: a network, mini-batches of its own, and numbers that say how good a model is."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.data.images import Images, load_images
from regtopk.lab.experiments.networks.engine import Engine
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.experiments.ranks.config import TrainConfig
from regtopk.lab.experiments.tasks.deep import Gpt, order_of, shards_of

HIDDEN = (256, 128)  # of the perceptron that reads digits


class DigitsOnRank:
    """A perceptron with two hidden layers, on this rank's rows of shuffled batches."""

    bucket_mb = 0.1  # of DDP: several buckets even in so small a model, as a large one has

    def __init__(self, config: TrainConfig, digits: Images) -> None:
        self._config = config
        self._digits = digits

    def make_network(self, seed: int) -> nn.Module:
        """As it starts, with torch's own initialisation: the same on every rank."""
        torch.manual_seed(seed)
        sizes = (self._digits.train.shape[1], *HIDDEN)
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], 10)).to(self._digits.train.device)

    def order(self, seed: int) -> Tensor:
        """Which digits this rank learns in every step, (T, B); a batch that would be short is left out."""
        return torch.stack(list(islice(self._batches(seed), self._config.num_steps)))

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(model(self._digits.train[rows]), self._digits.train_labels[rows])

    @torch.no_grad()
    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """The loss of all training digits, and the percent of the test digits that are read right."""
        loss = F.cross_entropy(network(self._digits.train), self._digits.train_labels)
        is_right = network(self._digits.test).argmax(-1) == self._digits.test_labels
        return {"loss": float(loss), "accuracy": 100 * float(is_right.float().mean())}

    def _batches(self, seed: int) -> Iterator[Tensor]:
        rank, num_workers = dist.get_rank(), dist.get_world_size()
        whole, num_train = self._config.batch_size * num_workers, len(self._digits.train)
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(num_train, generator=generator)
            for start in range(0, num_train - whole + 1, whole):
                yield order[start : start + whole][rank::num_workers]


class GptOnRank:
    """The task gpt of `regtopk compare`: this rank is one of its workers."""

    bucket_mb = None  # DDP's own

    def __init__(self, config: TrainConfig, examples: Examples) -> None:
        self._config = config
        self._examples = examples

    def make_network(self, seed: int) -> nn.Module:
        """As it starts, with GPT-2's initialisation: the same on every rank."""
        return Gpt.make_network(self._config, self._examples, seed).to(self._examples.train.device)

    def order(self, seed: int) -> Tensor:
        """Which windows this rank learns in every step, (T, B): those of the worker that it is."""
        shards = shards_of(self._config, self._examples, seed)
        return order_of(self._config, shards, seed)[:, dist.get_rank()]

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Nats per character."""
        scores = model(self._examples.train[rows]).float()
        return F.cross_entropy(scores.flatten(0, -2), self._examples.train_targets[rows].flatten())

    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """The test loss in nats per character, and the percent of characters that are guessed right."""
        return self._engine.evaluate(flatten(network).unsqueeze(0))[0]

    @cached_property
    def _engine(self) -> Engine:
        network = Gpt.make_network(self._config, self._examples, seed=0)
        return Engine(network, self._examples, num_workers=1, batch_size=self._config.batch_size)


RankTask = DigitsOnRank | GptOnRank


def save_examples(config: TrainConfig, path: Path) -> None:
    """Read the examples once for all ranks.

    Raises:
        ArgumentError: there is no such text, or too little of it for so many workers.
        MissingExtraError: the digits are not installed.
    """
    examples: Images | Examples
    if config.task == "digits":
        examples = load_images("digits", None, "cpu")
    else:
        examples = Gpt.load(replace(config, device="cpu"))
        shards_of(config, examples, seed=0)
    torch.save(examples._asdict(), path)


def load_task(config: TrainConfig, path: Path, device: torch.device) -> RankTask:
    """What `save_examples` wrote, as a task; all ranks share the file's memory."""
    saved: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
    on_device = {
        name: x.to(device) for name, x in saved.items() if isinstance(x, Tensor) and name != "labels"
    }
    examples: dict[str, Any] = {**saved, **on_device}
    if config.task == "digits":
        return DigitsOnRank(config, Images(**examples))
    return GptOnRank(config, Examples(**examples))
