"""Deep Gradient Compression: Top-k with momentum that is corrected for what is sent late."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.algorithms.own_choice import OwnChoice
from regtopk.algorithms.posterior import PosteriorScore, ScoredState, check_score, damped_by
from regtopk.core import Conversation, Promises, Worker, clear_at_, option, per_worker, take_largest_, within


@dataclass
class DGCState(ScoredState):
    """The residual v, the momentum u, and, for RegTop-k's score, what was sent last."""

    momentum: Tensor = per_worker("weighted_sum")


@dataclass(frozen=True, kw_only=True)
class DGC(OwnChoice[DGCState]):
    """Deep Gradient Compression (Lin, Han, Mao, Wang, Dally 2018).

    g_n := g_n min(1, clip N^(-1/2) / ||g_n||)                                 local clipping
    u_n := m u_n + g_n,  v_n := v_n + u_n                                      momentum correction
    s_n = Top_k(|v_n|), send s_n * v_n, receive g = sum_n w_n (s_n * v_n)
    v_n := v_n - s_n * v_n,  u_n := u_n - s_n * u_n                            factor masking

    The momentum is part of the algorithm, so the optimizer must be plain SGD. For the paper's warm-up, in
    which the density falls from 0.25 to 0.001, give ``density=WarmUp(density=0.001, num_steps=...)``.
    A worker that pays for an imputed entry keeps its momentum u_n there.

    Use it for: data spread evenly, plain SGD, and momentum wanted.

    Args:
        density, k, value_code, impute, returned: as in `OwnChoice`.
        momentum: m in [0, 1); 0 is Top-k.
        clip: the largest norm, > 0, of the mean gradient. None: no clipping.
        score: None selects by magnitude; a `PosteriorScore` by RegTop-k's, on v.

    Differs from the paper: k is exact, without a sampled threshold. The vector is clipped and selected from
    as a whole, biases and norms included, not layer by layer. There is no Nesterov form of the momentum.

    Checked against the authors' code: with the exact k, the same entries and values in every step.
    """

    name = "dgc"
    has_own_momentum = True
    momentum: float = option(0.9, within("[0, 1)"))
    clip: float | None = option(None, within("(0, inf)"))
    score: PosteriorScore | None = option(None, check_score)

    @property
    def promises(self) -> Promises:
        """A clipped gradient is not the dense one."""
        if self.clip is not None:
            return frozenset({"exact_k", "replicates"})
        return self.promised(frozenset({"dense_at_full_density", "exact_k", "replicates"}))

    def init(self, worker: Worker) -> DGCState:
        k, momentum = self.num_selected(worker), worker.zeros()
        return self.with_owed(DGCState.start(worker, self.score, k, momentum=momentum), worker)

    def exchange(self, grad: Tensor, state: DGCState, worker: Worker) -> Conversation:
        k, v = self.num_selected(worker), state.residual
        if self.clip is not None:
            # In float64, then rounded: a batch and a single worker add up in different orders.
            norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=True, dtype=torch.float64)
            factor: Tensor = self.clip / math.sqrt(worker.num_workers) / norm
            grad = factor.clamp(max=1).float().to(worker.weight.dtype) * grad
        u = state.momentum.mul_(self.momentum).add_(grad)
        damped = damped_by(self.score, state, v, u, worker)
        sent = take_largest_(v, u, k, code=self.sent_code, **damped)
        clear_at_(u, sent)
        aggregate = yield from self.sum_sent(sent, state, worker)
        state.remember(sent.indices, sent.values, aggregate, worker)
        return aggregate
