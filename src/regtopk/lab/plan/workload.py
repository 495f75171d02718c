"""What is exchanged: the sizes of a model's gradients, and how long its step takes without an exchange."""

import os
import pkgutil
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from regtopk.errors import ArgumentError
from regtopk.lab.plan.bench import Bench

SIDE = 1024  # of the square matrices that a model of unknown shapes is thought to be made of


@dataclass(frozen=True)
class Workload:
    """The gradients of a model, or its updates."""

    shapes: tuple[tuple[int, ...], ...]  # of the trainable parameters

    @cached_property
    def numel(self) -> int:
        """J, the number of parameters."""
        return sum(prod(shape) for shape in self.shapes)

    @classmethod
    def of_size(cls, numel: int) -> "Workload":
        """As many parameters in square matrices; what is left over in a narrower one and a vector."""
        num_matrices, left = divmod(numel, SIDE * SIDE)
        columns, rest = divmod(left, SIDE)
        shapes = [(SIDE, SIDE)] * num_matrices + [(SIDE, columns)] * (columns > 0) + [(rest,)] * (rest > 0)
        return cls(tuple(shapes))

    @classmethod
    def of_model(cls, model: nn.Module) -> "Workload":
        """The trainable parameters of a model."""
        workload = cls(tuple(tuple(p.shape) for p in model.parameters() if p.requires_grad))
        if workload.numel == 0:
            raise ArgumentError(
                f"model must have parameters that require a gradient, got none in {type(model).__name__}"
            )
        return workload


def load_model(spec: str) -> tuple[nn.Module, tuple[Any, ...] | None]:
    """Call what "pkg.module:callable" names, and take the model it returns, or the model and its inputs.

    Raises:
        ArgumentError: it cannot be imported or called (its own error is shown), or returns something else.
    """
    module_name, _, name = spec.partition(":")
    if not (module_name and name):
        raise ArgumentError(f"model must be pkg.module:callable, got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` would
    try:
        with redirect_stdout(sys.stderr):  # what a model prints does not belong to a plan
            made = pkgutil.resolve_name(spec)()
    except (Exception, SystemExit) as error:
        raise ArgumentError(
            f"model must be importable and callable without arguments, but {spec!r} failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            "model must return a torch.nn.Module, or one and its inputs, got "
            f"{type(model).__name__} from {spec!r}"
        )
    if inputs is not None and not isinstance(inputs, (tuple, list)):
        inputs = (inputs,)
    return model, None if inputs is None else tuple(inputs)


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape that "20,3,32,32" means."""
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ArgumentError(
            f"input shape must be whole numbers of at least 1, such as 20,3,32,32, got {text!r}"
        )
    return tuple(map(int, parts))


def measure_step(model: nn.Module, inputs: tuple[Any, ...], device: str) -> float:
    """Seconds of a forward and backward pass here: the median of a few, after one to warm up.

    Raises:
        ArgumentError: the model fails on these inputs (its own error is shown).
    """
    model.to(device).train()
    on_device = [x.to(device) if isinstance(x, Tensor) else x for x in inputs]

    def step() -> None:
        model.zero_grad()
        _some_loss(model(*on_device)).backward()

    try:
        with redirect_stdout(sys.stderr):
            return Bench(torch.device(device)).typical(step)
    except Exception as error:
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in inputs]
        raise ArgumentError(
            f"model must run forward and backward on its inputs, but with {shapes} it failed with "
            f"{type(error).__name__}: {error}"
        ) from error


def _some_loss(output: Any) -> Tensor:
    """A number to differentiate: the sum of the first tensor of an output."""
    while not isinstance(output, Tensor):
        output = next(iter(output.values() if isinstance(output, dict) else output))
    return output.float().sum()
