"""A stand-in for MIPD: every layer gets the share of the entries that its gradient makes significant."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.core import Layer, ResidualState, SparseSum, Worker, exact_sum, option, take_where_, within
from regtopk.core.algorithm import Conversation, ErrorFeedback, Promises, Sparsifier

_INSIGNIFICANT = 2.0**-500  # the significance of a layer of zeros, which gets what the others leave


@dataclass(frozen=True, kw_only=True)
class MIPDStyle(ErrorFeedback, Sparsifier[ResidualState]):
    """A stand-in in the style of MIPD (Zhang and Wang 2022): Top-k with a budget for every layer.

    a_n = e_n + g_n
    m_l = mean |a_n| over the J_l entries of layer l: how significant the layer is
    d_l = min(1, c m_l), its density, where c is such that sum_l J_l d_l = k
    s_n = the k_l largest |a_n| of every layer, k_l = J_l d_l rounded so that they add up to k
    send s_n * a_n, receive g = sum_n w_n (s_n * a_n), e_n := decay (a_n - s_n * a_n)

    Use it for: layers of very different importance.

    Args:
        density, k, value_code: as in `Sparsifier`.
        decay: the part of the residual that is kept per step, in [0, 1].

    Differs from the paper, of which only the abstract was at hand: there significance comes from model
    interpretability, and a parameter server smooths dropped gradients. This is not MIPD.
    """

    name = "mipd-style"
    decay: float = option(1.0, within("[0, 1]"))

    @property
    def promises(self) -> Promises:
        """A residual that fades is not conserved."""
        if self.decay < 1:
            return frozenset({"exact_k", "replicates"})
        return frozenset({"conserves", "dense_at_full_density", "exact_k", "replicates"})

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        accumulated = state.residual.mul_(self.decay).add_(grad)
        layers = [layer for layer in worker.layout.layers if layer.numel > 0]
        budgets = layer_budgets(accumulated, layers, k)
        is_taken = torch.empty_like(accumulated, dtype=torch.bool)
        for layer, budget in zip(layers, budgets.split(1, dim=-1), strict=True):
            most = min(k, layer.numel)
            descending = accumulated[..., layer.entries].abs().topk(most, dim=-1).indices
            is_within = torch.arange(most, device=grad.device) < budget
            part = is_taken[..., layer.entries]
            part.copy_(torch.zeros_like(part).scatter_(-1, descending, is_within))
        sent = take_where_(accumulated, is_taken, code=self.value_code)
        return (yield from SparseSum(sent, worker.weight))


def layer_budgets(accumulated: Tensor, layers: list[Layer], k: int) -> Tensor:
    """How many entries each layer sends, (..., L) int64, adding up to k, by its mean magnitude."""
    sizes = torch.tensor([layer.numel for layer in layers], device=accumulated.device)
    parts = [accumulated[..., layer.entries] for layer in layers]
    significance = torch.stack([exact_sum(part.abs()) for part in parts], dim=-1) / sizes + _INSIGNIFICANT
    is_full = torch.zeros_like(significance, dtype=torch.bool)
    # A layer that would send more entries than it has is full; the others share what it leaves.
    for _ in layers:
        left = k - (sizes * is_full).sum(-1, keepdim=True)
        others = exact_sum((sizes * significance).masked_fill(is_full, 0.0)).unsqueeze(-1)
        density = (left * significance / others).masked_fill(is_full, 1.0)
        was_full, is_full = is_full, density >= 1
        if torch.equal(is_full, was_full):
            break
    sent = torch.zeros_like(left, dtype=torch.float64)
    bounds = [sent.long()]
    for size, share in zip(sizes, density.clamp(max=1).split(1, dim=-1), strict=True):
        sent = sent + size * share
        bounds.append((sent + 0.5).floor().long())
    return torch.cat(bounds, dim=-1).diff(dim=-1)
