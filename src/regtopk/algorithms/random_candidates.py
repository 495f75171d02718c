"""Random candidates: the workers choose from the same random entries, and meet more often."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regtopk.core import (
    Conversation,
    ResidualState,
    SparseSum,
    Sparsifier,
    Worker,
    check_integer,
    random_subset,
    take_largest_,
    to_dense,
)


@dataclass(frozen=True, kw_only=True)
class RandomCandidates(Sparsifier[ResidualState]):
    """Top-k among candidates that all workers draw from one seed.

    a_n = e_n + g_n
    c = min(J, factor k) distinct entries drawn by (seed, t), the same on all workers
    s_n = Top_k(|a_n|) among c, send s_n * a_n, receive g = sum_n w_n (s_n * a_n)
    e_n := a_n - s_n * a_n

    Indices count the candidates only: they take little more than log2(factor) bits, whatever J is. Each
    worker chooses its own best candidates. A choice by the sum, as an oracle makes it, would be better. But
    the values of all candidates would have to travel first, and Random-k makes better use of those bytes.

    With 4-bit values this is the compressor of CocktailSGD (Wang et al. 2023): a random part of the entries,
    Top-k of this part, few bits a value, and error feedback. Its 10 % of the entries and 20 % of these are
    ``RandomCandidates(density=0.02, factor=5, value_code="4bit")``.

    Use it for: cheap indices: selection within a shared random part of the vector; CocktailSGD's compressor.

    Args:
        density: k / J in (0, 1]; or give ``k``.
        k: entries a worker sends.
        value_code: how values are coded on the wire.
        factor: candidates per entry sent, >= 1; 1 is Random-k.
        seed: an integer; the draw is a function of (seed, t), so it is the same after a resume.

    Differs from CocktailSGD's code. There the candidates are every tenth entry, one further on in each step,
    so each entry is a candidate once in ten steps; here they are drawn anew. Each worker there averages one
    region, compresses the average a second time, with a residual of its own, and sends that to all; here the
    sum is not compressed. The code selects from each region, not from the whole vector. Its 4-bit values are
    16 even levels from -max to 7/8 max of a bucket; here they are a sign and one of 8 magnitudes of a block.
    It exchanges what the local Adam changed, not gradients, and does so while the next step is computed.

    Checked against the code's compressor by reading: on the same candidates the same entries are selected,
    and what is not sent, or lost by the code, is carried. No run of the code was compared.
    """

    name: ClassVar[str] = "random-candidates"
    promises = frozenset({"conserves", "dense_at_full_density", "exact_k", "replicates"})
    factor: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_integer("factor", self.factor, at_least=1)
        check_integer("seed", self.seed)

    def init(self, worker: Worker) -> ResidualState:
        """The residual starts at zero."""
        return ResidualState(residual=worker.zeros())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        """One step: Top-k of the candidates as a vector of their own."""
        k = self.num_selected(worker)
        num_candidates = min(worker.numel, self.factor * k)
        drawn = random_subset(worker.numel, num_candidates, self.seed, worker.step, grad.device)
        candidates = drawn.expand(*grad.shape[:-1], num_candidates)
        part = state.residual.gather(-1, candidates)
        sent = take_largest_(part, grad.gather(-1, candidates), k, code=self.value_code)
        state.residual.add_(grad).scatter_(-1, candidates, part)
        total = yield from SparseSum(sent, worker.weight)
        return to_dense(drawn.expand(total.shape), total, worker.numel)
