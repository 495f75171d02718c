"""Gradient dropping: Top-k by a threshold that a small sample gives."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core import (
    Conversation,
    ResidualState,
    SparseGradient,
    SparseSum,
    Sparsifier,
    Worker,
    check_number,
    take_all_above_,
    take_where_,
)
from regtopk.errors import ArgumentError

_FEWEST_SAMPLED = 16  # a sample is so large that about as many of its entries reach the threshold


@dataclass(frozen=True, kw_only=True)
class GradientDropping(Sparsifier[ResidualState]):
    """Sparse communication for distributed gradient descent (Aji and Heafield 2017).

    a_n = e_n + g_n
    theta_n = the |a_n| that a share k / J of a sample of a_n reaches
    s_n = {j : |a_nj| >= theta_n}, send s_n * a_n, receive g = sum_n w_n (s_n * a_n)
    e_n := a_n - s_n * a_n

    Use it for: a historical baseline with a sampled threshold.

    Args:
        density: k / J in (0, 1], 0.01 in the paper; or give ``k``.
        k: about how many entries a worker sends.
        value_code: how values are coded on the wire.
        per_layer: whether every parameter has its own threshold. The paper advises one threshold for all
            where layer normalisation makes gradients comparable.
        sample: share of the entries that a threshold is estimated on, in (0, 1].

    Differs from the paper, of which only the abstract was at hand: a sample is evenly spaced and starts from
    another entry each step. It is made larger, up to all entries, where fewer than 16 of its entries would
    reach the threshold. Zeros are not sent.
    """

    name: ClassVar[str] = "gradient-dropping"
    promises = frozenset({"conserves", "replicates"})
    per_layer: bool = False
    sample: float = 0.001

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if type(self.per_layer) is not bool:
            raise ArgumentError(f"per_layer must be True or False, got {self.per_layer!r}")
        check_number("sample", self.sample, "in (0, 1]", lambda x: 0 < x <= 1)

    def init(self, worker: Worker) -> ResidualState:
        """The residual starts at zero."""
        return ResidualState(residual=worker.zeros())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        """One step of gradient dropping."""
        k = self.num_selected(worker)
        if self.per_layer:
            sent = self._take_per_layer_(state.residual, grad, k / worker.numel, worker)
        else:
            threshold = self._threshold(state.residual, grad, k / worker.numel, worker.step)
            sent = take_all_above_(state.residual, grad, threshold, k, code=self.value_code)
        return (yield from SparseSum(sent, worker.weight))

    def _take_per_layer_(
        self, residual: Tensor, grad: Tensor, density: float, worker: Worker
    ) -> SparseGradient:
        accumulated = residual.add_(grad)
        is_taken = torch.empty_like(accumulated, dtype=torch.bool)
        for layer in worker.layout.layers:
            own = accumulated[..., layer.start : layer.start + layer.numel]
            threshold = self._threshold(own, None, density, worker.step)
            is_taken[..., layer.start : layer.start + layer.numel] = own.abs() >= threshold.unsqueeze(-1)
        return take_where_(accumulated, is_taken, code=self.value_code)

    def _threshold(self, residual: Tensor, grad: Tensor | None, density: float, step: int) -> Tensor:
        numel = residual.shape[-1]
        num_samples = min(numel, math.ceil(max(self.sample * numel, _FEWEST_SAMPLED / density)))
        k = max(1, round(density * numel))
        threshold = kernels.estimate_threshold(residual, grad, k, num_samples=num_samples, start=step)
        return threshold.clamp(min=torch.finfo(threshold.dtype).tiny)
