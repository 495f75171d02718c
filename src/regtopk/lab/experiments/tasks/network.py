"""What tasks that train a network share: shards, batches, weights of workers, and the first models."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.data.splits import batch_order, divide, weights_of
from regtopk.lab.experiments.networks.flat import flatten, layout_of
from regtopk.lab.experiments.tasks.task import Task, TaskSettings


class NetworkTask(Task):
    """A network that learns from examples on the device; seeds draw first weights, shards and batches."""

    has_own_models = True

    def __init__(self, config: TaskSettings, seeds: Sequence[int], examples: Examples) -> None:
        super().__init__(config, seeds)
        self.examples = examples
        shards = [divide(examples.labels, config.num_workers, config.split, seed) for seed in seeds]
        orders = [
            batch_order(own, config.batch_size, config.num_steps, seed)
            for own, seed in zip(shards, seeds, strict=True)
        ]
        self.order = torch.stack(orders, 1).to(config.device)  # (T, R, N, B)
        self.weights = [weights_of(own, config.split) for own in shards]
        self._weights = torch.tensor(self.weights, device=config.device)
        self._start = torch.stack([flatten(self.make_network(config, examples, seed)) for seed in seeds])
        self.layout = layout_of(self.make_network(config, examples, seed=0))

    @classmethod
    def make_network(cls, config: TaskSettings, examples: Examples, seed: int) -> nn.Module:
        """The network as it starts."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls.draw_network(config, examples)

    @classmethod
    @abstractmethod
    def draw_network(cls, config: TaskSettings, examples: Examples) -> nn.Module:
        """The network, its weights drawn by torch's generator."""

    @classmethod
    def contents_of(cls, examples: Examples) -> Mapping[str, str]:
        """A hash of the examples."""
        return {"examples": examples.fingerprint}

    def start(self) -> Tensor:
        """The network's own initialisation, by seed."""
        return self._start.to(self.config.device, copy=True)

    def grads(self, models: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Of each worker's own mini-batch, at the seed's model or at its own."""
        grads, losses = self.grads_at(models, self.order[step])
        return grads, (self._weights * losses).sum(-1)

    @abstractmethod
    def grads_at(self, models: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients (R, N, J) and losses (R, N) of some examples (R, N, B)."""
