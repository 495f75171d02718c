"""Small networks on images: gradients of all workers at once, by torch.func."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from regtopk.core.worker import Layout, layer_kinds
from regtopk.lab.experiments.data.images import Images, load_images, standardised
from regtopk.lab.experiments.data.splits import batch_order, divide, weights_of
from regtopk.lab.experiments.tasks.task import Defaults, Task, TaskSettings


class Classification(Task):
    """A small network on images: the test accuracy in percent."""

    metric = "accuracy"
    is_better_higher = True
    num_last = 3  # accuracies are noisy
    has_own_models = True
    data_set: ClassVar[str]  # what it is learned from

    def __init__(self, config: TaskSettings, seeds: Sequence[int], examples: Images) -> None:
        super().__init__(config, seeds)
        self.images = examples
        labels = self.images.train_labels
        divided = [divide(labels, config.num_workers, config.split, seed) for seed in seeds]
        orders = [
            batch_order(parts, config.batch_size, config.num_steps, seed)
            for parts, seed in zip(divided, seeds, strict=True)
        ]
        self.order = torch.stack(orders).to(config.device)  # (R, T, N, B)
        self.weights = [weights_of(parts, config.split) for parts in divided]
        self.network = self.make_network()
        kinds = layer_kinds(self.network)
        self.layout = Layout.of_shapes(
            (name, tuple(p.shape), kinds[name]) for name, p in self.network.named_parameters()
        )
        of_one = grad_and_value(self._loss)
        self._grads = vmap(vmap(of_one, (None, 0, 0)), (0, 0, 0))
        self._grads_of_own = vmap(vmap(of_one, (0, 0, 0)), (0, 0, 0))

    @classmethod
    def load(cls, config: TaskSettings) -> Images:
        """The images, standardised."""
        path = Path(config.data) if config.data else None
        return standardised(load_images(cls.data_set, path, config.device))

    @abstractmethod
    def make_network(self) -> nn.Module:
        """The network, without buffers."""

    def start(self) -> Tensor:
        """torch's own initialisation, by seed."""
        models = []
        for seed in self.seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                network = self.make_network()
            models.append(nn.utils.parameters_to_vector(network.parameters()).detach())
        return torch.stack(models).to(self.config.device)

    def grads(self, models: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Of each worker's own mini-batch."""
        rows = self.order[:, step]
        of_all = self._grads_of_own if models.dim() == 3 else self._grads
        grads, losses = of_all(models, self.images.train[rows], self.images.train_labels[rows])
        weights = torch.tensor(self.weights, device=losses.device, dtype=losses.dtype)
        return grads.detach(), (weights * losses.detach()).sum(-1)

    @torch.no_grad()
    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """Percent of the test images."""
        qualities = []
        for model in models:
            scores = torch.cat([self._apply(model, part) for part in self.images.test.split(5000)])
            is_right = scores.argmax(-1) == self.images.test_labels
            qualities.append({self.metric: 100 * float(is_right.double().mean())})
        return qualities

    def _loss(self, model: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self._apply(model, x), y)

    def _apply(self, model: Tensor, x: Tensor) -> Tensor:
        parameters = {
            layer.name: model[layer.start : layer.start + layer.numel].view(layer.shape)
            for layer in self.layout.layers
        }
        scores: Tensor = functional_call(self.network, parameters, (x,))
        return scores


class Digits(Classification):
    """scikit-learn's digits with a perceptron 64-64-10."""

    data_set = "digits"
    defaults = Defaults(num_workers=8, num_steps=300, batch_size=16, lr=(0.2,))

    def make_network(self) -> nn.Module:
        """One hidden layer."""
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class FashionMnist(Classification):
    """Fashion-MNIST with a perceptron 784-256-128-10."""

    data_set = "fashion-mnist"
    defaults = Defaults(num_workers=8, num_steps=1500, batch_size=20, lr=(0.1,))

    def make_network(self) -> nn.Module:
        """Two hidden layers: J = 235,146."""
        return nn.Sequential(
            nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
        )


class Cifar10(Classification):
    """CIFAR-10 with a small convolutional network."""

    data_set = "cifar10"
    defaults = Defaults(num_workers=8, num_steps=2000, batch_size=20, lr=(0.05,))

    def make_network(self) -> nn.Module:
        """Three convolutions and two linear layers."""
        blocks: list[nn.Module] = []
        for channels_in, channels_out in ((3, 32), (32, 64), (64, 128)):
            blocks += [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10))
