"""The frozen facts about a worker, or about a batch of workers, that an algorithm may read."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from regtopk.errors import ArgumentError


@dataclass(frozen=True)
class Layer:
    """One parameter's place in the flat vector: entries start to start + numel.

    Layer-wise algorithms look at its `kind`: "conv", "linear", "recurrent", "embedding", "norm", "bias" or
    "other".
    """

    name: str
    shape: tuple[int, ...]
    start: int
    kind: str = "other"

    @property
    def numel(self) -> int:
        """How many entries the parameter has."""
        return prod(self.shape)

    @property
    def entries(self) -> slice:
        """Its entries in the last dimension of a flat vector: ``vector[..., layer.entries]``."""
        return slice(self.start, self.start + self.numel)

    @property
    def sides(self) -> tuple[int, int]:
        """Its shape as a matrix: the first dimension against all others; a vector is one row."""
        if len(self.shape) < 2:
            return 1, self.numel
        return self.shape[0], self.numel // self.shape[0]


@dataclass(frozen=True)
class Layout:
    """Which entries of the flat vector belong to which parameter, in order and without gaps."""

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        start = 0
        for layer in self.layers:
            if layer.start != start:
                raise ArgumentError(
                    f"layout must be without gaps: layer {layer.name!r} must start at {start}, "
                    f"got {layer.start}"
                )
            start += layer.numel

    @cached_property
    def numel(self) -> int:
        """J, the length of the flat vector."""
        return sum(layer.numel for layer in self.layers)

    @classmethod
    def anonymous(cls, numel: int) -> "Layout":
        """One nameless layer of `numel` entries."""
        return cls((Layer("", (numel,), 0),))

    @classmethod
    def of_shapes(cls, shapes: Iterable[tuple[str, tuple[int, ...], str]]) -> "Layout":
        """From (name, shape, kind) in flat order."""
        layers, start = [], 0
        for name, shape, kind in shapes:
            layers.append(Layer(name, tuple(shape), start, kind))
            start += layers[-1].numel
        return cls(tuple(layers))


@dataclass(frozen=True)
class Report:
    """What training measured since the last step, for algorithms that adapt to it.

    Args:
        loss: the training loss.
        time_s: how long one step takes, measured or from a link model.
    """

    loss: float
    time_s: float


@dataclass(frozen=True)
class Worker:
    """One rank, or in the simulator all of them as a batch.

    Args:
        weight: w_n in the dtype sums run in (float32 or float64): () on a rank, (N, 1) in the simulator.
        index: n, int64, of the same shape.
        num_workers: N.
        step: t, from 0.
        layout: which parameter owns which entries.
        batch_shape: leading dimensions of this worker's vectors: () on a rank, (N,) in the simulator,
            (R, N) when it runs R independent replicas of the cluster at once.
        report: the newest loss and time, the same on all ranks; None if there is none since the last step.
        idle: the workers of weight zero, ascending, the same on all ranks.
        index_code: how the cluster codes indices; only the size of what is sent depends on it.
    """

    weight: Tensor
    index: Tensor
    num_workers: int
    step: int
    layout: Layout
    batch_shape: tuple[int, ...] = ()
    report: Report | None = None
    idle: tuple[int, ...] = ()
    index_code: str = "elias-fano"

    @property
    def numel(self) -> int:
        """J, the length of the gradient."""
        return self.layout.numel

    @property
    def num_owners(self) -> int:
        """How many workers have weight above zero: these share the entries of a vector (`core.owners`)."""
        return self.num_workers - len(self.idle)

    @property
    def senders(self) -> list[int]:
        """The workers of weight above zero, in rank order, starting from another one each step."""
        active = [rank for rank in range(self.num_workers) if rank not in self.idle]
        first = self.step % len(active)
        return active[first:] + active[:first]

    def at(self, step: int, report: Report | None) -> "Worker":
        """The same worker at another step."""
        return replace(self, step=step, report=report)

    def zeros(self, size: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A zero vector for this worker, J long unless a size is given: what a state starts from."""
        size = self.numel if size is None else size
        return self.weight.new_zeros(*self.batch_shape, size, dtype=dtype)


def check_weights(weights: Sequence[float] | Tensor | None, num_workers: int) -> Tensor:
    """The weights as float64 (N,); refused unless finite, >= 0 and summing to one within 1e-6."""
    if weights is None:
        return torch.full((num_workers,), 1 / num_workers, dtype=torch.float64)
    w = torch.as_tensor(weights, dtype=torch.float64).detach().cpu().clone()
    if w.shape != (num_workers,):
        raise ArgumentError(
            f"weights must be one number for each of the {num_workers} workers, got shape {tuple(w.shape)}"
        )
    is_refused = ~torch.isfinite(w) | (w < 0)
    if bool(is_refused.any()):
        first = int(is_refused.int().argmax())
        raise ArgumentError(f"weights must be finite and >= 0, got {float(w[first])} for worker {first}")
    if abs(float(w.sum()) - 1) > 1e-6:
        raise ArgumentError(f"weights must sum to 1 within 1e-6, got a sum of {float(w.sum())}")
    return w


def layer_kinds(module: nn.Module) -> dict[str, str]:
    """Parameter name to "conv", "linear", "recurrent", "embedding", "norm", "bias" or "other"."""
    kinds = {}
    for module_name, part in module.named_modules():
        for name, p in part.named_parameters(recurse=False):
            kinds[f"{module_name}.{name}" if module_name else name] = _kind(part, name, p)
    return kinds


def _kind(part: nn.Module, name: str, p: nn.Parameter) -> str:
    class_name = type(part).__name__.lower()
    if name.startswith("bias"):
        return "bias"
    if isinstance(part, nn.RNNBase):
        return "recurrent"
    for word in ("conv", "linear", "embedding", "norm"):
        if word in class_name:
            return word
    return "other" if p.dim() > 1 else "bias"
