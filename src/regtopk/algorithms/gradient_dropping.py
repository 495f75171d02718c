"""Gradient dropping: Top-k by a threshold that a small sample gives."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.algorithm import Conversation, ErrorFeedback, Sparsifier
from regtopk.core.options import option, true_or_false, within
from regtopk.core.requests import SparseSum
from regtopk.core.selection import take_all_above_, take_where_
from regtopk.core.sparse import SparseGradient
from regtopk.core.state import ResidualState
from regtopk.core.worker import Worker

_FEWEST_SAMPLED = 16  # a sample is so large that about as many of its entries reach the threshold


@dataclass(frozen=True, kw_only=True)
class GradientDropping(ErrorFeedback, Sparsifier[ResidualState]):
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
        per_layer: whether every parameter has its own threshold.
        sample: share of the entries that a threshold is estimated on, in (0, 1].

    Differs from the paper, of which only the abstract was at hand: a sample is evenly spaced, and larger
    where fewer than 16 of its entries would reach the threshold. Zeros are not sent.
    """

    name = "gradient-dropping"
    promises = frozenset({"conserves", "replicates"})
    per_layer: bool = option(False, true_or_false)
    sample: float = option(0.001, within("(0, 1]"))

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
            own = accumulated[..., layer.entries]
            threshold = self._threshold(own, None, density, worker.step)
            is_taken[..., layer.entries] = own.abs() >= threshold.unsqueeze(-1)
        return take_where_(accumulated, is_taken, code=self.value_code)

    def _threshold(self, residual: Tensor, grad: Tensor | None, density: float, step: int) -> Tensor:
        numel = residual.shape[-1]
        num_samples = min(numel, math.ceil(max(self.sample * numel, _FEWEST_SAMPLED / density)))
        k = max(1, round(density * numel))
        threshold = kernels.estimate_threshold(residual, grad, k, num_samples=num_samples, start=step)
        return threshold.clamp(min=torch.finfo(threshold.dtype).tiny)
