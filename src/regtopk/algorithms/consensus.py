"""Consensus: the workers agree on one support, to which each contributes its best entries."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.algorithms.posterior import PosteriorScore, ScoredState, check_score, damped_by
from regtopk.core import Conversation, DenseSum, Gather, Promises, Sparsifier, Worker, integer, one_of, option
from regtopk.core.codes import VALUE_CODES, is_lossless
from regtopk.core.random import random_sequence
from regtopk.core.sparse import find_largest_, take_at_, to_dense


@dataclass(frozen=True, kw_only=True)
class Consensus(Sparsifier[ScoredState]):
    """All workers send the same k entries: the best k / N of each, gathered first.

    a_n = e_n + g_n
    p_n = the ceil(k / N) entries of largest |a_n| (or RegTop-k's score), gathered as index sets
    s = the first k distinct entries of p_1, p_2, ..., p_N, and then of a random sequence (seed, t)
    send s * a_n, receive g = sum_n w_n (s * a_n), e_n := a_n - s * a_n

    An entry costs one value and 1/N of an index, and a worker sends and receives O(k) at any N. Random
    entries fill up the support where proposals coincide, so no entry waits for ever. On a shared support
    every worker learns the exact sum of the others, which RegTop-k's score assumes. The order of the workers
    turns by one every step; workers of weight zero do not count in N.

    Use it for: workers whose data differ, at a small byte budget: first in our equal-bytes comparisons.

    Args:
        density, k, value_code: as in `Sparsifier`, of the support and of what is sent to be summed.
        sum_code: how the sums are coded on the way back. The worker that summed keeps what a code loses.
        score: None proposes by magnitude; a `PosteriorScore` by RegTop-k's.
        seed: an integer; the random entries are a function of (seed, t).

    The method is our own.
    """

    name = "consensus"
    sum_code: str = option("float32", one_of(*VALUE_CODES))
    score: PosteriorScore | None = option(None, check_score)
    seed: int = option(0, integer())

    @property
    def promises(self) -> Promises:
        """With a lossy sum_code a worker does not conserve its own; all workers together still do."""
        if not is_lossless(self.sum_code):
            return frozenset({"conserves_sum", "exact_k", "replicates", "shared_support"})
        return frozenset({"conserves", "dense_at_full_density", "exact_k", "replicates", "shared_support"})

    def init(self, worker: Worker) -> ScoredState:
        return ScoredState.start(worker, self.score, self.num_selected(worker))

    def exchange(self, grad: Tensor, state: ScoredState, worker: Worker) -> Conversation:
        k, residual, senders = self.num_selected(worker), state.residual, worker.senders
        damped = damped_by(self.score, state, residual, grad, worker)
        own = find_largest_(residual, grad, -(-k // len(senders)), **damped)
        gathered = yield from Gather(own, numel=worker.numel)
        drawn = random_sequence(worker.numel, k, self.seed, worker.step, grad.device)
        support = first_distinct(gathered.joined(senders), drawn, k)
        values = take_at_(residual, None, support, code=self.value_code)
        loss = None if is_lossless(self.sum_code) else torch.empty_like(values)
        total = yield from DenseSum(values, worker.weight, self.value_code, self.sum_code, loss)
        indices = support.expand(values.shape)
        if loss is not None:
            residual.scatter_add_(-1, indices, loss)
        aggregate = to_dense(support, total, worker.numel)
        state.remember(indices, values, aggregate, worker)
        return aggregate


def first_distinct(proposed: Tensor, drawn: Tensor, k: int) -> Tensor:
    """The first k distinct entries of the proposed, (..., m), followed by the drawn, (k,); ascending."""
    entries = torch.cat([proposed, drawn.expand(*proposed.shape[:-1], k)], dim=-1)
    ascending, place = entries.sort(dim=-1, stable=True)
    is_repeated = torch.zeros_like(ascending, dtype=torch.bool)
    is_repeated[..., 1:] = ascending[..., 1:] == ascending[..., :-1]
    place = place.masked_fill(is_repeated, entries.shape[-1])
    kept = place.topk(k, dim=-1, largest=False, sorted=False).indices
    return ascending.gather(-1, kept.sort(dim=-1).values)
