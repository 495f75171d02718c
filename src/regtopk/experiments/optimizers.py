"""Optimizers of flat models, with the clipping and the schedule that go with them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regtopk.core.worker import Layout


@dataclass(frozen=True)
class Recipe:
    """An optimizer and what goes with it.

    Args:
        make: from parameters and lr to a torch optimizer.
        weight_decay: of matrices and embeddings alone, apart from the gradient:
            theta := (1 - lr weight_decay) theta.
        max_norm: gradients of a larger norm are scaled down to it; 0: never.
        warm_up: steps in which the learning rate grows linearly.
        last_share: of the learning rate, where a cosine ends after the warm-up; 1: it stays.
    """

    make: Callable[..., torch.optim.Optimizer]
    weight_decay: float = 0.0
    max_norm: float = 0.0
    warm_up: int = 0
    last_share: float = 1.0

    def lr_share(self, step: int, num_steps: int) -> float:
        """The share of the learning rate in a step of so many."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        if self.last_share == 1:
            return 1.0
        done = (step - self.warm_up) / (num_steps - self.warm_up)
        return self.last_share + (1 - self.last_share) * (1 + math.cos(math.pi * done)) / 2


OPTIMIZERS = {
    "sgd": Recipe(torch.optim.SGD),
    "momentum": Recipe(partial(torch.optim.SGD, momentum=0.9)),
    "adam": Recipe(torch.optim.Adam),
    "adamw": Recipe(
        partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.0),
        weight_decay=0.1,
        max_norm=1.0,
        warm_up=100,
        last_share=0.1,
    ),
    "sgdw": Recipe(torch.optim.SGD, weight_decay=0.1, warm_up=100, last_share=0.1),
}


class Descent:
    """Models that follow gradients, each its own.

    Args:
        models: (..., J), changed by every step.
        recipe: how.
        lr: learning rate.
        layout: says which entries are matrices.
        num_steps: how many steps there will be, for recipes whose learning rate has a schedule.
    """

    def __init__(self, models: Tensor, recipe: Recipe, lr: float, layout: Layout, num_steps: int) -> None:
        assert num_steps or recipe.last_share == 1, "a schedule needs its number of steps"
        self.models = models
        self._recipe = recipe
        self._lr = lr
        self._num_steps = num_steps
        self._optimizer = recipe.make([models], lr=lr)
        self._decay = _decay_of(layout, recipe.weight_decay).to(models) if recipe.weight_decay else None

    @torch.no_grad()
    def step(self, grads: Tensor, step: int) -> None:
        """Take a step of all models; `grads` (..., J) is not changed."""
        lr = self._lr * self._recipe.lr_share(step, self._num_steps)
        self._optimizer.param_groups[0]["lr"] = lr
        if self._decay is not None:
            self.models.addcmul_(self.models, self._decay, value=-lr)
        self.models.grad = clipped(grads, self._recipe.max_norm) if self._recipe.max_norm else grads
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of the optimizer."""
        self._optimizer.load_state_dict(state)


def clipped(grads: Tensor, max_norm: float) -> Tensor:
    """Rows (..., J) scaled down to a norm, as torch's `clip_grad_norm_` does it."""
    norms: Tensor = torch.linalg.vector_norm(grads, dim=-1, keepdim=True)
    return grads * (max_norm / (norms + 1e-6)).clamp(max=1.0)


def _decay_of(layout: Layout, weight_decay: float) -> Tensor:
    """The decay of every entry, (J,): none for biases and norms."""
    decay = torch.zeros(layout.numel)
    for layer in layout.layers:
        if len(layer.shape) > 1:
            decay[layer.start : layer.start + layer.numel] = weight_decay
    return decay
