"""The task gpt of `regtopk compare`, as ranks learn it: each rank is one of its workers."""

from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.networks.engine import Engine
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.experiments.ranks.training import RankTask
from regtopk.lab.experiments.tasks.deep import Gpt, GptSettings, make_network, order_of, shards_of


def save_examples(config: GptSettings, path: Path) -> None:
    """Read the text once for all ranks.

    Raises:
        ArgumentError: there is no such text, or too little of it for so many workers.
    """
    examples = Gpt.load(config)
    shards_of(config, examples, seed=0)
    torch.save(examples._asdict(), path)


class GptOnRank(RankTask):
    """A GPT on this rank's windows of a text.

    Args:
        config: sizes and how many workers.
        path: what `save_examples` wrote. All ranks share its memory.
        device: where.
    """

    def __init__(self, config: GptSettings, path: Path, device: torch.device) -> None:
        self._config = config
        saved = torch.load(path, mmap=True, weights_only=True)
        on_device = {name: x.to(device) for name, x in saved.items() if isinstance(x, Tensor)}
        self.examples = Examples(**{**saved, **on_device, "labels": saved["labels"]})

    def make_network(self, seed: int) -> nn.Module:
        """GPT-2's initialisation."""
        return make_network(self._config, self.examples, seed).to(self.examples.train.device)

    def order(self, seed: int) -> Tensor:
        """Of the worker that this rank is."""
        shards = shards_of(self._config, self.examples, seed)
        return order_of(self._config, shards, seed)[:, dist.get_rank()]

    def loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Nats per character."""
        scores = model(self.examples.train[rows]).float()
        return F.cross_entropy(scores.flatten(0, -2), self.examples.train_targets[rows].flatten())

    def evaluate(self, network: nn.Module) -> dict[str, float]:
        """The test loss in nats per character, and the percent of characters that are guessed right."""
        return self._engine.evaluate(flatten(network).unsqueeze(0))[0]

    @cached_property
    def _engine(self) -> Engine:
        network = make_network(self._config, self.examples, seed=0)
        return Engine(network, self.examples, num_workers=1, batch_size=self._config.batch_size)
