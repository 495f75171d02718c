"""Deep Gradient Compression: Top-k with momentum that is corrected for what is sent late."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.algorithms.imputation import Impute, check_impute, sum_sent, with_learning
from regtopk.algorithms.posterior import PosteriorScore, ScoredState, check_score, damped_by
from regtopk.core import (
    Conversation,
    DenseSum,
    Promises,
    SparseGradient,
    Sparsifier,
    Worker,
    check_choice,
    check_number,
    clear_at_,
    kth_largest,
    per_worker,
    put_back_,
    send_,
    take_largest_,
)
from regtopk.errors import ArgumentError

_FEWEST, _MOST = 0.8, 1.3  # times k: outside this range the sampled threshold is refined
_NUM_REFINEMENTS = 10


@dataclass
class DGCState(ScoredState):
    """The residual v, the momentum u, and, for RegTop-k's score, what was sent last."""

    momentum: Tensor = per_worker("weighted_sum")


@dataclass(frozen=True, kw_only=True)
class DGC(Sparsifier[DGCState]):
    """Deep Gradient Compression (Lin, Han, Mao, Wang, Dally 2018).

    g_n := g_n min(1, clip N^(-1/2) / ||g_n||)                                 local clipping
    u_n := m u_n + g_n,  v_n := v_n + u_n                                      momentum correction
    s_n = Top_k(|v_n|), send s_n * v_n, receive g = sum_n w_n (s_n * v_n)
    v_n := v_n - s_n * v_n,  u_n := u_n - s_n * u_n                            factor masking

    The momentum is part of the algorithm, so the optimizer must be plain SGD. For the paper's warm-up, in
    which the density falls from 0.25 to 0.001, give ``density=WarmUp(density=0.001, num_steps=...)``.

    Use it for: data spread evenly, plain SGD, and momentum wanted.

    Args:
        density: k / J in (0, 1]; or give ``k``.
        k: entries a worker sends.
        value_code: how values are coded on the wire.
        momentum: m in [0, 1); 0 is Top-k.
        clip: the largest norm, > 0, of the mean gradient: each worker clips its own gradient to a norm of
            clip N^(-1/2). None: no clipping.
        selection: "exact" sends exactly k entries; "sampled" sends those that reach a threshold estimated on
            a sample. If fewer than 0.8 k reach it, it is multiplied by 0.8, up to 10 times. If more than
            1.3 k reach it then, the k largest are sent.
        sample: share of the entries that the threshold is estimated on, in (0, 1].
        score: None selects by magnitude; a `PosteriorScore` by RegTop-k's, on v (with "exact" only).
        dense_vectors: whether parameters of fewer than two dimensions (biases, norms) are sent dense, as u_n,
            uncoded and without factor masking. The authors' code does so.
        impute: rho in [0, 1]: a worker that did not send an entry is taken to hold rho times the mean of
            those that did, and pays it from v_n (docs/imputation.md). 0: nothing is inferred.
            "learned": rho is found during training.

    A worker that pays for an entry that others sent keeps its momentum u_n there.

    Differs from the paper: the exact k is the default, since it takes no longer here. The vector is clipped
    and selected from as a whole, not layer by layer. By default this includes biases and norms. What a value
    code loses of a sent entry stays in v. Nesterov's form of the momentum is left out. If the whole vector is
    sent (k = J), factor masking leaves no momentum.

    Checked against the authors' code: with the exact k, the same entries and values in every step.
    """

    name: ClassVar[str] = "dgc"
    has_own_momentum: ClassVar[bool] = True
    momentum: float = 0.9
    clip: float | None = None
    selection: Literal["exact", "sampled"] = "exact"
    sample: float = 0.01
    score: PosteriorScore | None = None
    dense_vectors: bool = False
    impute: Impute = 0.0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_number("momentum", self.momentum, "in [0, 1)", lambda x: 0 <= x < 1)
        if self.clip is not None:
            check_number("clip", self.clip, "None or a finite norm > 0", lambda x: 0 < x < math.inf)
        check_choice("selection", self.selection, ("exact", "sampled"))
        check_number("sample", self.sample, "in (0, 1]", lambda x: 0 < x <= 1)
        check_score(self.score)
        check_impute(self.impute)
        if type(self.dense_vectors) is not bool:
            raise ArgumentError(f"dense_vectors must be True or False, got {self.dense_vectors!r}")
        if self.score is not None and self.selection == "sampled":
            raise ArgumentError("selection must be 'exact' with a score, got 'sampled'")

    @property
    def promises(self) -> Promises:
        """A clipped gradient is not the dense one, and a sampled threshold is not reached by exactly k.

        Vectors that are sent dense are not among the k, and keep their momentum.
        """
        if self.selection == "sampled" or self.dense_vectors:
            return frozenset({"replicates"})
        if self.clip is not None:
            return frozenset({"exact_k", "replicates"})
        return frozenset({"dense_at_full_density", "exact_k", "replicates"})

    def init(self, worker: Worker) -> DGCState:
        """Nothing is carried, and nothing was sent."""
        num_sent = self.num_selected(worker)
        momentum = worker.zeros()
        state = DGCState.start(worker, num_sent=0 if self.score is None else num_sent, momentum=momentum)
        return with_learning(self.impute, state, worker)

    def exchange(self, grad: Tensor, state: DGCState, worker: Worker) -> Conversation:
        """One step of DGC."""
        k = self.num_selected(worker)
        u = state.momentum.mul_(self.momentum).add_(self._clipped(grad, worker))
        vectors = [x for x in worker.layout.layers if self.dense_vectors and len(x.shape) < 2 and x.numel > 0]
        if not vectors:
            return (yield from self._exchange_largest(u, k, state, worker))
        dense = torch.cat([torch.arange(x.start, x.start + x.numel, device=u.device) for x in vectors])
        own = u[..., dense]
        total = yield from DenseSum(own, worker.weight)
        if own.shape[-1] == worker.numel:
            return total
        u[..., dense] = 0.0  # so that v stays zero there, and other entries are selected
        aggregate = yield from self._exchange_largest(u, k, state, worker)
        u[..., dense], aggregate[..., dense] = own, total
        return aggregate

    def _exchange_largest(self, u: Tensor, k: int, state: DGCState, worker: Worker) -> Conversation:
        v = state.residual
        if self.selection == "sampled":
            sent = self._take_sampled_(v, u, k, worker.step)
        else:
            damped = damped_by(self.score, state, v, u, worker)
            sent = take_largest_(v, u, k, code=self.value_code, **damped)
        clear_at_(u, sent)
        aggregate = yield from sum_sent(self.impute, sent, state, worker)
        if self.score is not None:
            state.remember(sent.indices, sent.values, aggregate, worker)
        return aggregate

    def _clipped(self, grad: Tensor, worker: Worker) -> Tensor:
        if self.clip is None:
            return grad
        # In float64, then rounded: a batch and a single worker add up in different orders.
        norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=True, dtype=torch.float64)
        factor: Tensor = self.clip / math.sqrt(worker.num_workers) / norm
        return factor.clamp(max=1).float().to(worker.weight.dtype) * grad

    def _take_sampled_(self, v: Tensor, u: Tensor, k: int, step: int) -> SparseGradient:
        num_samples = math.ceil(self.sample * v.shape[-1])
        threshold = kernels.estimate_threshold(v, u, k, num_samples=num_samples, start=step)
        smallest = torch.finfo(v.dtype).tiny  # zeros are not sent
        threshold = threshold.clamp(min=smallest)
        capacity = min(v.shape[-1], max(k, int(_MOST * k)))  # more than k may equal the k-th
        taken = kernels.take_above_(v, u, threshold, capacity)
        for _ in range(_NUM_REFINEMENTS):
            is_too_high = taken.num_found < _FEWEST * k
            if not bool(is_too_high.any()):
                break
            threshold = threshold.where(~is_too_high, _FEWEST * threshold).clamp(min=smallest)
            put_back_(v, taken)
            taken = kernels.take_above_(v, None, threshold, capacity)
        # Residuals pile up just below the last threshold: almost none would reach one raised by a factor.
        is_too_low = taken.num_found > _MOST * k
        if bool(is_too_low.any()):
            put_back_(v, taken)
            threshold = threshold.where(~is_too_low, kth_largest(v, k))
            taken = kernels.take_above_(v, None, threshold, capacity)
        return send_(v, taken, self.value_code)
