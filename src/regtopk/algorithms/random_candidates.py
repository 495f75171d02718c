"""Random candidates: the workers choose from the same random entries, and meet more often."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.core import Conversation, ErrorFeedback, ResidualState, SparseSum, Sparsifier, Worker, to_dense
from regtopk.core.options import integer, option
from regtopk.core.random import random_subset
from regtopk.core.sparse import take_largest_


@dataclass(frozen=True, kw_only=True)
class RandomCandidates(ErrorFeedback, Sparsifier[ResidualState]):
    """Top-k among candidates that all workers draw from one seed.

    a_n = e_n + g_n
    c = min(J, factor k) distinct entries drawn by (seed, t), the same on all workers
    s_n = Top_k(|a_n|) among c, send s_n * a_n, receive g = sum_n w_n (s_n * a_n)
    e_n := a_n - s_n * a_n

    Indices count the candidates only: they take little more than log2(factor) bits, whatever J is. With 4-bit
    values this is the compressor of CocktailSGD (Wang et al. 2023). Its 10 % of the entries and 20 % of these
    are ``RandomCandidates(density=0.02, factor=5, value_code="4bit")``.

    Use it for: cheap indices: selection within a shared random part of the vector; CocktailSGD's compressor.

    Args:
        density, k, value_code: as in `Sparsifier`.
        factor: candidates per entry sent, >= 1; 1 is Random-k.
        seed: an integer; the draw is a function of (seed, t).

    Differs from CocktailSGD's code: there candidates are every tenth entry, and each worker compresses the
    average of its region a second time.

    Checked against the code's compressor by reading. No run of the code was compared.
    """

    name = "random-candidates"
    promises = frozenset({"conserves", "dense_at_full_density", "exact_k", "replicates"})
    factor: int = option(16, integer(at_least=1))
    seed: int = option(0, integer())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        num_candidates = min(worker.numel, self.factor * k)
        drawn = random_subset(worker.numel, num_candidates, self.seed, worker.step, grad.device)
        candidates = drawn.expand(*grad.shape[:-1], num_candidates)
        part = state.residual.gather(-1, candidates)
        sent = take_largest_(part, grad.gather(-1, candidates), k, code=self.value_code)
        state.residual.add_(grad).scatter_(-1, candidates, part)
        total = yield from SparseSum(sent, worker.weight)
        return to_dense(drawn.expand(total.shape), total, worker.numel)
