"""Perceptrons on images: gradients of all workers at once, by torch.func."""

from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from regtopk.lab.experiments.data.examples import Examples, of_images
from regtopk.lab.experiments.tasks.task import NetworkTask, TaskSettings


def perceptron(*sizes: int) -> nn.Sequential:
    """Linear layers from one size to the next, with ReLU between them."""
    layers = [part for a, b in pairwise(sizes) for part in (nn.ReLU(), nn.Linear(a, b))]
    return nn.Sequential(*layers[1:])


class Classification(NetworkTask):
    """A perceptron on images: the test accuracy in percent."""

    metric = "accuracy"
    is_better_higher = True
    num_last = 3  # accuracies are noisy
    data_set: ClassVar[str]  # what it is learned from
    hidden: ClassVar[tuple[int, ...]]  # the widths of its hidden layers

    @classmethod
    def load(cls, config: TaskSettings) -> Examples:
        """The images as vectors, standardised."""
        examples = of_images(cls.data_set, config.data, config.device)
        return examples._replace(train=examples.train.flatten(1), test=examples.test.flatten(1))

    @classmethod
    def draw_network(cls, config: TaskSettings, examples: Examples) -> nn.Module:
        """With torch's own initialisation."""
        return perceptron(examples.train.shape[1], *cls.hidden, examples.num_classes)

    def grads_at(self, models: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """All in one call."""
        loss = grad_and_value(lambda model, x, y: F.cross_entropy(self._apply(model, x), y))
        of_a_seed = vmap(loss, (0 if models.dim() == 3 else None, 0, 0))
        grads, losses = vmap(of_a_seed)(models, self.examples.train[rows], self.examples.train_targets[rows])
        return grads.detach(), losses.detach()

    @torch.no_grad()
    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """Percent of the test images."""
        qualities = []
        for model in models:
            scores = torch.cat([self._apply(model, part) for part in self.examples.test.split(5000)])
            is_right = scores.argmax(-1) == self.examples.test_targets
            qualities.append({self.metric: 100 * float(is_right.double().mean())})
        return qualities

    def _apply(self, model: Tensor, x: Tensor) -> Tensor:
        parameters = {layer.name: model[layer.entries].view(layer.shape) for layer in self.layout.layers}
        scores: Tensor = functional_call(self.network, parameters, (x,))
        return scores


class Digits(Classification):
    """scikit-learn's digits with a perceptron 64-64-10."""

    data_set = "digits"
    hidden = (64,)
    defaults: ClassVar = dict(num_workers=8, num_steps=300, batch_size=16, lr=(0.2,))


class FashionMnist(Classification):
    """Fashion-MNIST with a perceptron 784-256-128-10: J = 235,146."""

    data_set = "fashion-mnist"
    hidden = (256, 128)
    defaults: ClassVar = dict(num_workers=8, num_steps=1500, batch_size=20, lr=(0.1,))
