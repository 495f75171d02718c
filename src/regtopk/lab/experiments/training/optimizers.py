"""Optimizers, with the weight decay, the clipping and the schedule that go with them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regtopk.core.worker import Layout
from regtopk.lab.experiments.training.muon import MOMENTUM, FlatMuon, TorchMuon, is_for_muon
from regtopk.lab.method import Method


@dataclass(frozen=True)
class Recipe:
    """An optimizer and what goes with it."""

    make: Callable[..., Optimizer]  # from parameters and lr
    muon_momentum: float | None = None  # of Muon for the matrices in blocks, which `make` then is not for
    weight_decay: float = 0.0  # of matrices and embeddings alone: theta := (1 - lr weight_decay) theta
    max_norm: float = 0.0  # gradients of a larger norm are scaled down to it; 0: never
    warm_up: int = 0  # steps in which the learning rate grows linearly
    last_share: float = 1.0  # of the learning rate, where a cosine ends after the warm-up; 1: it stays

    def lr_share(self, step: int, num_steps: int) -> float:
        """The share of the learning rate in a step of so many."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        if self.last_share == 1:
            return 1.0
        done = (step - self.warm_up) / (num_steps - self.warm_up)
        return self.last_share + (1 - self.last_share) * (1 + math.cos(math.pi * done)) / 2


ADAMW = Recipe(
    partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.0),
    weight_decay=0.1, max_norm=1.0, warm_up=100, last_share=0.1,
)  # fmt: skip
SIGNS = partial(torch.optim.Adam, betas=(0.0, 0.0), eps=1e-12)  # theta := theta - lr sign(grad)
WITH_BETA2 = ("adam", "adamw", "muon")
OPTIMIZERS = {
    "sgd": Recipe(torch.optim.SGD),
    "momentum": Recipe(partial(torch.optim.SGD, momentum=0.9)),
    "adam": Recipe(torch.optim.Adam),
    "adamw": ADAMW,
    "muon": replace(ADAMW, muon_momentum=MOMENTUM),
    # steps of a given size, whatever the gradient's (docs of EF21: EF21-Muon)
    "lmo": replace(ADAMW, make=SIGNS, muon_momentum=0.0, weight_decay=0.0, max_norm=0.0),
    "sgdw": Recipe(torch.optim.SGD, weight_decay=0.1, warm_up=100, last_share=0.1),
}


def recipe_of(method: Method) -> Recipe:
    """The recipe of a method's optimizer, with the weight decay and the beta2 that its words name."""
    recipe = OPTIMIZERS[method.optimizer]
    if method.weight_decay is not None:
        recipe = replace(recipe, weight_decay=method.weight_decay)
    if method.beta2 is not None:
        recipe = replace(recipe, make=partial(recipe.make, betas=(0.9, float(method.beta2))))
    return recipe


class Descent:
    """Parameters that follow their gradients: they decay, gradients are clipped, and the optimizer steps.

    Simulated workers and real ranks take their steps here, so both make the same operations in one order. The
    model is one network, or flat models (..., J) of a layout, each of which goes its own way. Recipes with a
    schedule ask how many steps there will be.
    """

    def __init__(
        self,
        model: nn.Module | Tensor,
        recipe: Recipe,
        lr: float,
        num_steps: int,
        layout: Layout | None = None,
    ) -> None:
        self._are_models, momentum = isinstance(model, Tensor), recipe.muon_momentum
        if isinstance(model, Tensor):
            assert layout is not None
            self._parameters = [model]
            decays = [torch.full((x.numel,), recipe.weight_decay * (len(x.shape) > 1)) for x in layout.layers]
            self._decays = [torch.cat(decays).to(model)]
            make = partial(recipe.make, fused=True) if model.is_cuda else recipe.make  # one pass over memory
            if momentum is None:
                self.optimizers = [make([model], lr=lr)]
            else:
                self.optimizers = [FlatMuon(model, layout, make, lr, momentum)]
        else:
            self._parameters = list(model.parameters())
            self._decays = [p.new_tensor(recipe.weight_decay * (p.dim() > 1)) for p in self._parameters]
            own: dict[bool, list[nn.Parameter]] = {True: [], False: []}
            for name, p in model.named_parameters():
                own[momentum is not None and is_for_muon(name, p.shape)].append(p)
            self.optimizers = [recipe.make(own[False], lr=lr)]
            if momentum is not None:
                self.optimizers.insert(0, TorchMuon(own[True], lr=lr, momentum=momentum))
        self._recipe, self._lr, self._num_steps = recipe, lr, num_steps

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Take a step by the gradients that the parameters hold; clipped ones replace them."""
        lr = self._lr * self._recipe.lr_share(step, self._num_steps)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = lr
        if self._recipe.weight_decay:
            for p, decay in zip(self._parameters, self._decays, strict=True):
                p.addcmul_(p, decay, value=-lr)
        if self._recipe.max_norm:
            self._clip()
        for optimizer in self.optimizers:
            optimizer.step()

    def _clip(self) -> None:
        """Scale gradients down to a norm, as torch's `clip_grad_norm_` does but for the last bits.

        The norm is that of all entries at once, not that of the norms of parameters.
        """
        grads = [p.grad for p in self._parameters if p.grad is not None]
        entries = grads[0] if self._are_models else torch.cat([grad.flatten() for grad in grads])
        norms = torch.linalg.vector_norm(entries, dim=-1, keepdim=True)
        scale = (self._recipe.max_norm / (norms + 1e-6)).clamp(max=1.0)
        for p in self._parameters:
            p.grad = None if p.grad is None else p.grad * scale
