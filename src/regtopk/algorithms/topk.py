"""Top-k with error feedback: what RegTop-k corrects."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.algorithms.imputation import sum_sent, with_imputation
from regtopk.core import Conversation, ErrorFeedback, Promises, ResidualState, Sparsifier, Worker
from regtopk.core.options import option, within
from regtopk.core.sparse import take_largest_


@dataclass(frozen=True, kw_only=True)
class TopK(ErrorFeedback, Sparsifier[ResidualState]):
    """Keep the k largest entries of the accumulated gradient; carry the rest (Section 1.1).

    a_n = e_n + g_n
    s_n = Top_k(|a_n|), send s_n * a_n, receive g = sum_n w_n (s_n * a_n)
    e_n := a_n - s_n * a_n

    Use it for: the plain baseline of every comparison.

    Args:
        density, k, value_code: as in `Sparsifier`.
        impute: rho in [0, 1]; 0 infers nothing (docs/imputation.md).
    """

    name = "topk"
    impute: float = option(0.0, within("[0, 1]"))

    @property
    def promises(self) -> Promises:
        """A worker that pays for others' entries conserves its own only together with them."""
        return with_imputation(
            self.impute, frozenset({"conserves", "dense_at_full_density", "exact_k", "one_sum", "replicates"})
        )

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        sent = take_largest_(state.residual, grad, k, code=self.value_code)
        return (yield from sum_sent(self.impute, sent, state.residual, worker))
