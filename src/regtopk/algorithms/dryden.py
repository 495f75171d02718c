"""Dryden's adaptive quantisation: the largest of either sign, each replaced by a mean."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.core import Conversation, ErrorFeedback, ResidualState, SparseSum, WithDensity, Worker
from regtopk.core.sparse import take_where_


@dataclass(frozen=True, kw_only=True)
class Dryden(ErrorFeedback, WithDensity[ResidualState]):
    """Adaptive quantisation (Dryden, Moon, Jacobs, Van Essen 2016).

    a_n = e_n + g_n
    s_n = the largest share k / J of the positive entries of a_n, and the same of the negative ones
    send j in s_n and its sign; its value is the mean of the entries of that sign
    receive g = sum_n w_n (sent), e_n := a_n - sent

    Use it for: one bit per value, with the density given.

    Args:
        density, k: as in `WithDensity`, of the share of either sign: at least one entry of each.

    Differs from the paper: the shares are exact, not those above a sampled threshold. There are two means per
    128 entries sent, not per matrix: a value costs one bit and a half.

    Checked against the equations, programmed a second time. The paper's full text was not at hand.
    """

    name = "dryden"
    promises = frozenset({"conserves", "replicates"})

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        accumulated = state.residual.add_(grad)
        is_taken = torch.zeros_like(accumulated, dtype=torch.bool)
        for one_sided in (accumulated.clamp(min=0), -accumulated.clamp(max=0)):
            num_of_sign = (one_sided > 0).sum(-1, keepdim=True)
            share = (num_of_sign.double() * (k / worker.numel)).round().long()
            num_taken = share.clamp(min=1).minimum(num_of_sign)
            largest = one_sided.topk(k, dim=-1).indices
            is_among = torch.arange(k, device=grad.device) < num_taken
            is_taken |= torch.zeros_like(is_taken).scatter_(-1, largest, is_among)
        sent = take_where_(accumulated, is_taken, code="sign")
        return (yield from SparseSum(sent, worker.weight))
