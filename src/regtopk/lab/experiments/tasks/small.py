"""The tasks of `regtopk compare`: two toy workers, linear regression, small networks on images, and a GPT."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from regtopk.core.layers import layer_kinds
from regtopk.core.worker import Layout
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.protocol import Protocol
from regtopk.lab.experiments.data.images import Images, load_images, standardised
from regtopk.lab.experiments.data.splits import batch_order, divide, weights_of
from regtopk.lab.experiments.paper import toy
from regtopk.lab.experiments.paper.fig2 import Fig2Config, make_problems
from regtopk.lab.experiments.tasks.compared_task import ComparedTask, Defaults
from regtopk.lab.experiments.tasks.deep import Gpt


class LinearRegression(ComparedTask):
    """Figure 2's regression: the distance from the optimum."""

    metric = "distance"
    is_better_higher = False
    has_log_axis = True
    defaults = Defaults(num_workers=20, num_steps=2500, batch_size=500, lr=0.01)

    def __init__(self, config: Protocol, seeds: Sequence[int], examples: Any = None) -> None:
        super().__init__(config, seeds)
        if config.split != "iid":
            raise ArgumentError(
                f"split must be iid for linreg, whose workers differ anyway, got {config.split!r}"
            )
        self.problems = make_problems(
            Fig2Config(
                seeds=",".join(map(str, self.seeds)) + ",",
                num_workers=config.num_workers,
                num_points=config.batch_size,
                device=config.device,
            )
        )
        self.layout = Layout.anonymous(self.problems.optimum.shape[-1])
        self.weights = [[1 / config.num_workers] * config.num_workers] * len(self.seeds)

    def start(self) -> Tensor:
        """From zero, in float64."""
        return self.problems.start.clone()

    def grads(self, models: Tensor, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """Full batches: A_n w - b_n."""
        return self.problems.grads(models.unsqueeze(1)).squeeze(1), self._distance(models)

    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """||w - w*||."""
        return [{self.metric: distance} for distance in self._distance(models).tolist()]

    def _distance(self, models: Tensor) -> Tensor:
        distance: Tensor = torch.linalg.vector_norm(models - self.problems.optimum, dim=-1)
        return distance


class Toy(ComparedTask):
    """Figure 1's two workers, whose large entries cancel: the risk."""

    metric = "risk"
    is_better_higher = False
    has_log_axis = True
    defaults = Defaults(num_workers=2, num_steps=100, batch_size=1, lr=0.9)

    def __init__(self, config: Protocol, seeds: Sequence[int], examples: Any = None) -> None:
        super().__init__(config, seeds)
        if (config.num_workers, config.split) != (len(toy.POINTS), "iid"):
            raise ArgumentError(
                f"toy has {len(toy.POINTS)} workers and no split, got num_workers={config.num_workers}, "
                f"split={config.split!r}"
            )
        self.layout = Layout.anonymous(len(toy.START))
        self.weights = [[0.5, 0.5]] * len(self.seeds)

    def start(self) -> Tensor:
        """The paper's start, in float64; nothing is drawn, so all seeds are alike."""
        start = torch.tensor(toy.START, dtype=torch.float64, device=self.config.device)
        return start.repeat(len(self.seeds), 1)

    def grads(self, models: Tensor, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """Of the logistic loss."""
        return torch.stack([toy.grads(model) for model in models]), self._risk(models)

    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """F(w)."""
        return [{self.metric: risk} for risk in self._risk(models).tolist()]

    def _risk(self, models: Tensor) -> Tensor:
        return torch.stack([toy.risk(model) for model in models])


class Classification(ComparedTask):
    """A small network on images: the test accuracy in percent."""

    metric = "accuracy"
    is_better_higher = True
    has_own_models = True
    data_set: ClassVar[str]  # what it is learned from

    def __init__(self, config: Protocol, seeds: Sequence[int], examples: Images) -> None:
        super().__init__(config, seeds)
        self.images = examples
        divided = [divide(self.images.train_labels, config.num_workers, config.split, s) for s in seeds]
        orders = [
            batch_order(parts, config.batch_size, config.plan.stops[-1], seed)
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
    def load(cls, config: Any) -> Images:
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

    def grads(self, models: Tensor, step: int, lr: float) -> tuple[Tensor, Tensor]:
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
    defaults = Defaults(num_workers=8, num_steps=300, batch_size=16, lr=0.2)

    def make_network(self) -> nn.Module:
        """One hidden layer."""
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class FashionMnist(Classification):
    """Fashion-MNIST with a perceptron 784-256-128-10."""

    data_set = "fashion-mnist"
    defaults = Defaults(num_workers=8, num_steps=1500, batch_size=20, lr=0.1)

    def make_network(self) -> nn.Module:
        """Two hidden layers: J = 235,146."""
        return nn.Sequential(
            nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
        )


class Cifar10(Classification):
    """CIFAR-10 with a small convolutional network."""

    data_set = "cifar10"
    defaults = Defaults(num_workers=8, num_steps=2000, batch_size=20, lr=0.05)

    def make_network(self) -> nn.Module:
        """Three convolutions and two linear layers."""
        blocks: list[nn.Module] = []
        for channels_in, channels_out in ((3, 32), (32, 64), (64, 128)):
            blocks += [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 10))


TASKS: dict[str, type[ComparedTask]] = {
    "toy": Toy,
    "linreg": LinearRegression,
    "digits": Digits,
    "fashion-mnist": FashionMnist,
    "cifar10": Cifar10,
    "gpt": Gpt,
}
