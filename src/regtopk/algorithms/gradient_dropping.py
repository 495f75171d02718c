"""Gradient dropping: Top-k by a threshold that a small sample gives."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.core import Conversation, ErrorFeedback, ResidualState, SparseSum, Sparsifier, Worker
from regtopk.core.options import option, within
from regtopk.core.sparse import take_all_above_

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
        density, k, value_code: as in `Sparsifier`.
        sample: share of the entries that a threshold is estimated on, in (0, 1].

    Differs from the paper, of which only the abstract was at hand: a sample is evenly spaced, and larger
    where fewer than 16 of its entries would reach the threshold. Layers have no thresholds of their own.
    Zeros are not sent.
    """

    name = "gradient-dropping"
    promises = frozenset({"conserves", "replicates"})
    sample: float = option(0.001, within("(0, 1]"))

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        k, numel = self.num_selected(worker), worker.numel
        num_samples = min(numel, math.ceil(max(self.sample * numel, _FEWEST_SAMPLED / (k / numel))))
        # Another start in every step, so that no entry is left out for good.
        sample = torch.arange(num_samples, device=grad.device) * numel // num_samples
        sample = (worker.step + sample) % numel
        sampled = state.residual.index_select(-1, sample).add_(grad.index_select(-1, sample)).abs()
        threshold = sampled.topk(max(1, round(k * num_samples / numel)), dim=-1).values[..., -1]
        threshold = threshold.clamp(min=torch.finfo(threshold.dtype).tiny)
        sent = take_all_above_(state.residual, grad, threshold, k, code=self.value_code)
        return (yield from SparseSum(sent, worker.weight))
