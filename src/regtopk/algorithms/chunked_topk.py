"""Chunked Top-k: the largest entries of every chunk, with a residual that fades."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.algorithms.own_choice import OwnChoice
from regtopk.algorithms.posterior import PosteriorScore, ScoredState, check_score, damped_by
from regtopk.core import Conversation, Promises, Worker, integer, option, take_largest_, within


@dataclass(frozen=True, kw_only=True)
class ChunkedTopK(OwnChoice[ScoredState]):
    """Top-k of every chunk of the flat vector, after SparseLoCo (Sarfi et al. 2025).

    a_n = decay e_n + g_n
    s_n = the k_c largest |a_n| of every chunk, send s_n * a_n, receive g = sum_n w_n (s_n * a_n)
    e_n := a_n - s_n * a_n

    SparseLoCo sends 64 of every 4,096 entries of an update as 2-bit values:
    ``ChunkedTopK(density=1 / 64, value_code="2bit", decay=0.95)``. `SparseLoCo` is closer to its code.

    Use it for: rare exchanges of model differences (local steps), and selection within fixed chunks.

    Args:
        density, k, value_code, impute, returned: as in `OwnChoice`; k_c = max(1, round(density chunk)) with
            density = k / J.
        chunk: the most entries a chunk may have, >= 1. Chunks are equally long; the last may be shorter.
        decay: the part of the residual that is kept per step, in [0, 1].
        score: None selects by magnitude; a `PosteriorScore` by RegTop-k's, within each chunk.

    Differs from SparseLoCo's code: an entry is the weighted sum over all workers, as the paper prints it, not
    the mean over its senders; chunks are runs of the flat vector, not tiles; by default nothing fades.
    """

    name = "chunked-topk"
    chunk: int = option(4096, integer(at_least=1))
    decay: float = option(1.0, within("[0, 1]"))
    score: PosteriorScore | None = option(None, check_score)

    @property
    def promises(self) -> Promises:
        """A residual that fades is not conserved, and one that pays for others only together with theirs."""
        promises: Promises = frozenset({"conserves", "dense_at_full_density", "one_sum", "replicates"})
        if self.decay < 1:
            promises -= {"conserves", "dense_at_full_density"}
        return self.promised(promises)

    def init(self, worker: Worker) -> ScoredState:
        chunk, k_per_chunk = self._sizes(worker)
        num_whole, rest = divmod(worker.numel, chunk)
        num_sent = num_whole * k_per_chunk + min(k_per_chunk, rest)
        return self.with_owed(ScoredState.start(worker, self.score, num_sent), worker)

    def exchange(self, grad: Tensor, state: ScoredState, worker: Worker) -> Conversation:
        chunk, k = self._sizes(worker)
        residual = state.residual.mul_(self.decay)
        damped = damped_by(self.score, state, residual, grad, worker)
        sent = take_largest_(residual, grad, k, chunk=chunk, code=self.sent_code, **damped)
        aggregate = yield from self.sum_sent(sent, state, worker)
        state.remember(sent.indices, sent.values, aggregate, worker)
        return aggregate

    def _sizes(self, worker: Worker) -> tuple[int, int]:
        """Entries per chunk, and how many of them are sent."""
        num_chunks = -(-worker.numel // self.chunk)
        chunk = -(-worker.numel // num_chunks)
        return chunk, max(1, round(self.num_selected(worker) * chunk / worker.numel))
