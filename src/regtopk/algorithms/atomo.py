"""ATOMO: an unbiased sample of the gradient's entries, drawn by their size."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.core import Conversation, NoState, SparseSum, WithDensity, Worker, integer, option, to_integers
from regtopk.core.random import uniform
from regtopk.core.sparse import SparseGradient, take_where_


@dataclass(frozen=True, kw_only=True)
class Atomo(WithDensity[NoState]):
    """Atomic sparsification with entries as atoms (Wang et al. 2018).

    lambda = g_n, in the basis of unit vectors
    p_i = min(1, s |lambda_i| / sum |lambda|) by the sequential rule, s = k, so sum_i p_i = k
    send lambda_i / p_i with probability p_i, receive g = sum_n w_n (sent)

    No other unbiased sample of k entries on average has a smaller variance. There is no residual. At small
    densities the noise is large.

    Use it for: unbiased estimates without a residual.

    Args:
        density, k: as in `WithDensity`, of the entries sent on average.
        seed: an integer; draws are a function of (seed, n, t, i).

    Values are not coded, since rounding would bias them.

    Checked against the sequential rule, programmed a second time: the same probabilities to rounding.
    """

    name = "atomo"
    promises = frozenset({"dense_at_full_density", "replicates", "unbiased"})
    seed: int = option(0, integer())

    def init(self, worker: Worker) -> NoState:
        return NoState()

    def exchange(self, grad: Tensor, state: NoState, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        draws = uniform(worker.index, self.seed, worker.step, worker.numel)
        sent = draw_entries(grad.to(worker.weight.dtype), k, draws)
        return (yield from SparseSum(sent, worker.weight))


def draw_entries(x: Tensor, k: int, draws: Tensor) -> SparseGradient:
    """x_i / p_i where a uniform draw falls below p_i: (..., J) and draws that broadcast to it."""
    probability = keep_probability(x.abs(), k)
    scaled = (x.double() / probability).to(x.dtype)
    return take_where_(scaled, draws < probability)


def keep_probability(magnitude: Tensor, s: float) -> Tensor:
    """ATOMO's sequential rule: p_i in [0, 1], (..., n) float64, zero only for zeros, of sum s.

    As long as the largest would get s |lambda_i| / sum |lambda| > 1, it gets p_i = 1, and the rule goes on
    with the others and s - 1. With c such atoms, p_i = min(1, (s - c) |lambda_i| / the sum of the others).
    """
    if s >= magnitude.shape[-1]:
        return torch.ones_like(magnitude, dtype=torch.float64)
    integers, unit = to_integers(magnitude)  # sums of integers are the same batched and single
    largest = integers.topk(math.ceil(s), dim=-1).values
    others = integers.sum(-1, keepdim=True) - (largest.cumsum(-1) - largest)  # those from the i-th on
    left = s - torch.arange(largest.shape[-1], device=magnitude.device, dtype=torch.float64)
    is_shared = largest * left <= others
    num_certain = (is_shared.cumsum(-1) == 0).sum(-1, keepdim=True)
    rest = (others.gather(-1, num_certain) * unit).clamp(min=torch.finfo(torch.float64).tiny)
    return ((s - num_certain.double()) * magnitude.double() / rest).clamp(max=1)
