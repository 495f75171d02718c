"""Chunked Top-k: the largest entries of every chunk, with a residual that fades."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regtopk.algorithms.imputation import Impute, check_impute, sum_sent, with_imputation, with_learning
from regtopk.algorithms.posterior import PosteriorScore, ScoredState, check_score, damped_by
from regtopk.core import (
    Conversation,
    Promises,
    Sparsifier,
    Worker,
    check_integer,
    check_number,
    take_largest_per_chunk_,
)


@dataclass(frozen=True, kw_only=True)
class ChunkedTopK(Sparsifier[ScoredState]):
    """Top-k of every chunk, after SparseLoCo (2025).

    a_n = decay e_n + g_n
    s_n = the k_c largest |a_n| of every chunk, send s_n * a_n, receive g = sum_n w_n (s_n * a_n)
    e_n := a_n - s_n * a_n

    SparseLoCo exchanges the difference that several local steps made, in place of a gradient. It sends 64 of
    every 4,096 entries as 2-bit values: ``ChunkedTopK(density=1 / 64, value_code="2bit", decay=0.95)``.

    Use it for: rare exchanges of model differences (local steps), and selection within fixed chunks.

    Args:
        density: share of every chunk, in (0, 1]: k_c = max(1, round(density chunk)); or give ``k``.
        k: entries of the whole vector, spread over the chunks: density = k / J.
        value_code: how values are coded on the wire.
        chunk: the most entries a chunk may have, >= 1. The vector is cut into as few chunks as possible. They
            are equally long, but the last may be a few entries shorter.
        decay: the part of the residual that is kept per step, in [0, 1]; 1 keeps all of it.
        score: None selects by magnitude; a `PosteriorScore` by RegTop-k's, within each chunk.
        impute: rho in [0, 1]: a worker that did not send an entry is taken to hold rho times the mean of
            those that did, and pays it from its residual (docs/imputation.md). 0: nothing is inferred.
            "learned": rho is found during training.

    Differs from SparseLoCo's public code. There an entry is the mean over the workers that sent it; here it
    is the sum over all workers, each with its weight, as the paper prints it. In a comparison with 8 workers
    the code's aggregate was 6.2 times as long, so its outer learning rate cannot be carried over. The code
    cuts matrices into tiles of 64 x 64 and vectors into runs of up to 64; here a chunk is a run of the flat
    vector, across parameters, and a remainder is spread over all chunks. Its 2-bit values are four bins of
    1.5 standard deviations around the mean of a whole tensor, each decoded to its mean; here "2bit" is a sign
    and one of two magnitudes of each block of 128 entries. Templar, which trains with that code, also clips
    what a worker sends to the median norm of all workers. By default nothing fades: where a gradient is sent
    in every step, decay loses accuracy. Indices travel in the cluster's index code, not as 12 bits each.
    """

    name: ClassVar[str] = "chunked-topk"
    chunk: int = 4096
    decay: float = 1.0
    score: PosteriorScore | None = None
    impute: Impute = 0.0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_integer("chunk", self.chunk, at_least=1)
        check_number("decay", self.decay, "in [0, 1]", lambda x: 0 <= x <= 1)
        check_score(self.score)
        check_impute(self.impute)

    @property
    def promises(self) -> Promises:
        """A residual that fades is not conserved, and one that pays for others only together with theirs."""
        promises: Promises = frozenset({"conserves", "dense_at_full_density", "one_sum", "replicates"})
        if self.decay < 1:
            promises -= {"conserves", "dense_at_full_density"}
        return with_imputation(self.impute, promises)

    def init(self, worker: Worker) -> ScoredState:
        """Nothing is carried, and nothing was sent."""
        chunk, k_per_chunk = self._sizes(worker)
        num_whole, rest = divmod(worker.numel, chunk)
        num_sent = num_whole * k_per_chunk + min(k_per_chunk, rest)
        state = ScoredState.start(worker, num_sent=0 if self.score is None else num_sent)
        return with_learning(self.impute, state, worker)

    def exchange(self, grad: Tensor, state: ScoredState, worker: Worker) -> Conversation:
        """One step of chunked Top-k."""
        chunk, k_per_chunk = self._sizes(worker)
        residual = state.residual.mul_(self.decay)
        damped = damped_by(self.score, state, residual, grad, worker)
        sent = take_largest_per_chunk_(residual, grad, chunk, k_per_chunk, code=self.value_code, **damped)
        aggregate = yield from sum_sent(self.impute, sent, state, worker)
        if self.score is not None:
            state.remember(sent.indices, sent.values, aggregate, worker)
        return aggregate

    def _sizes(self, worker: Worker) -> tuple[int, int]:
        """Entries per chunk, and how many of them are sent."""
        num_chunks = -(-worker.numel // self.chunk)
        chunk = -(-worker.numel // num_chunks)
        return chunk, max(1, round(self.num_selected(worker) * chunk / worker.numel))
