"""Deep Gradient Compression: Top-k with momentum that is corrected for what is sent late."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.algorithms.posterior import LastSent, PosteriorScore, check_score, damping_of
from regtopk.core.algorithm import Conversation, Promise, Sparsifier
from regtopk.core.options import check_choice, check_number
from regtopk.core.requests import SparseSum
from regtopk.core.selection import kth_largest, put_back_, send_, take_largest_
from regtopk.core.sparse import SparseGradient, clear_at_
from regtopk.core.state import per_worker
from regtopk.core.worker import Worker
from regtopk.errors import ArgumentError

_FEWEST, _MOST = 0.8, 1.3  # of k: outside, the sampled threshold is refined
_NUM_REFINEMENTS = 10


@dataclass
class DGCState(LastSent):
    """The residual v, the momentum u, and, for RegTop-k's score, what was sent last."""

    residual: Tensor = per_worker("weighted_sum")
    momentum: Tensor = per_worker("weighted_sum")


@dataclass(frozen=True, kw_only=True)
class DGC(Sparsifier[DGCState]):
    """Deep Gradient Compression (Lin, Han, Mao, Wang, Dally 2018).

    g_n := g_n min(1, clip N^(-1/2) / ||g_n||)                                 local clipping
    u_n := m u_n + g_n,  v_n := v_n + u_n                                      momentum correction
    s_n = Top_k(|v_n|), send s_n * v_n, receive g = sum_n w_n (s_n * v_n)
    v_n := v_n - s_n * v_n,  u_n := u_n - s_n * u_n                            factor masking

    Momentum is in here, so the optimizer must be plain SGD. For the paper's warm-up, in which the density
    falls from 0.25 to 0.001, give ``density=WarmUp(density=0.001, num_steps=...)``.

    Args:
        density: k / J in (0, 1]; or give ``k``.
        k: entries a worker sends.
        value_code: how values are coded on the wire.
        momentum: m in [0, 1); 0 is Top-k.
        clip: norm > 0 that the mean gradient may have: each worker clips its own vector to clip N^(-1/2)
            before it is accumulated. None: no clipping.
        selection: "exact" sends exactly k entries; "sampled" those that reach a threshold estimated on a
            sample. If fewer than 0.8 k do, it is lowered by 0.8 up to 10 times; if then more than 1.3 k do,
            the k largest are sent.
        sample: share of the entries that the threshold is estimated on, in (0, 1].
        score: None selects by magnitude; a `PosteriorScore` by RegTop-k's, on v (with "exact" only).

    Differs from the paper: the exact k is the default, since it takes no longer here. One vector is clipped
    and selected from as a whole, not every layer. A residual that a value code leaves on sent entries stays
    in v. Nesterov's form of the momentum is left out. With the whole vector sent (k = J) factor masking
    leaves no momentum.
    """

    name: ClassVar[str] = "dgc"
    # with "exact" selection; "sampled" keeps none of the first two
    promises: ClassVar[frozenset[Promise]] = frozenset({"dense_at_full_density", "exact_k", "replicates"})
    momentum: float = 0.9
    clip: float | None = None
    selection: Literal["exact", "sampled"] = "exact"
    sample: float = 0.01
    score: PosteriorScore | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_number("momentum", self.momentum, "in [0, 1)", lambda x: 0 <= x < 1)
        if self.clip is not None:
            check_number("clip", self.clip, "None or a finite norm > 0", lambda x: 0 < x < math.inf)
        check_choice("selection", self.selection, ("exact", "sampled"))
        check_number("sample", self.sample, "in (0, 1]", lambda x: 0 < x <= 1)
        check_score(self.score)
        if self.score is not None and self.selection == "sampled":
            raise ArgumentError("selection must be 'exact' with a score, got 'sampled'")

    def init(self, worker: Worker) -> DGCState:
        """Nothing is carried, and nothing was sent."""
        num_damped = 0 if self.score is None else self.num_selected(worker)
        last_sent = LastSent.nothing(worker, num_damped)
        return DGCState(residual=worker.zeros(), momentum=worker.zeros(), **last_sent)

    def exchange(self, grad: Tensor, state: DGCState, worker: Worker) -> Conversation:
        """One step of DGC."""
        k, v = self.num_selected(worker), state.residual
        u = state.momentum.mul_(self.momentum).add_(self._clipped(grad, worker))
        if self.selection == "sampled":
            sent = self._take_sampled_(v, u, k, worker.step)
        else:
            damping = damping_of(self.score, state, v, u, worker)
            sent = take_largest_(v, u, k, code=self.value_code, **damping)
        clear_at_(u, sent)
        aggregate: Tensor = yield SparseSum(sent, worker.weight)
        if self.score is not None:
            state.remember(sent.indices, sent.values, aggregate, worker)
        return aggregate

    def _clipped(self, grad: Tensor, worker: Worker) -> Tensor:
        if self.clip is None:
            return grad
        # in float64, then rounded: a batch and a single worker add up in different orders
        norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=True, dtype=torch.float64)
        factor: Tensor = self.clip / math.sqrt(worker.num_workers) / norm
        return factor.clamp(max=1).float().to(worker.weight.dtype) * grad

    def _take_sampled_(self, v: Tensor, u: Tensor, k: int, step: int) -> SparseGradient:
        num_samples = math.ceil(self.sample * v.shape[-1])
        threshold = kernels.estimate_threshold(v, u, k, num_samples=num_samples, start=step)
        smallest = torch.finfo(v.dtype).tiny  # zeros are not sent
        threshold = threshold.clamp(min=smallest)
        capacity = min(v.shape[-1], max(k, int(_MOST * k)))  # equals of the k-th may be more
        taken = kernels.take_above_(v, u, threshold, capacity)
        for _ in range(_NUM_REFINEMENTS):
            is_too_high = taken.num_found < _FEWEST * k
            if not bool(is_too_high.any()):
                break
            threshold = threshold.where(~is_too_high, _FEWEST * threshold).clamp(min=smallest)
            put_back_(v, taken)
            taken = kernels.take_above_(v, None, threshold, capacity)
        # Residuals pile up just below the last threshold: raised by a factor, it would leave almost nothing.
        is_too_low = taken.num_found > _MOST * k
        if bool(is_too_low.any()):
            put_back_(v, taken)
            threshold = threshold.where(~is_too_low, kth_largest(v, k))
            taken = kernels.take_above_(v, None, threshold, capacity)
        return send_(v, taken, self.value_code)
