"""Top-k with error feedback: what RegTop-k corrects."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regtopk.algorithms.imputation import Impute, check_impute, sum_sent, with_imputation, with_learning
from regtopk.core import Conversation, Promises, ResidualState, Sparsifier, Worker, take_largest_


@dataclass(frozen=True, kw_only=True)
class TopK(Sparsifier[ResidualState]):
    """Keep the k largest entries of the accumulated gradient; carry the rest (Section 1.1).

    a_n = e_n + g_n
    s_n = Top_k(|a_n|), send s_n * a_n, receive g = sum_n w_n (s_n * a_n)
    e_n := a_n - s_n * a_n

    Use it for: the plain baseline of every comparison.

    Args:
        density: k / J in (0, 1]; or give ``k``.
        k: entries a worker sends.
        value_code: how values are coded on the wire.
        impute: rho in [0, 1]: a worker that did not send an entry is taken to hold rho times the mean of
            those that did, and pays it from its residual (docs/imputation.md). 0: nothing is inferred.
            "learned": rho is found during training.
    """

    name: ClassVar[str] = "topk"
    impute: Impute = 0.0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_impute(self.impute)

    @property
    def promises(self) -> Promises:
        """A worker that pays for others' entries conserves its own only together with them."""
        return with_imputation(
            self.impute, frozenset({"conserves", "dense_at_full_density", "exact_k", "one_sum", "replicates"})
        )

    def init(self, worker: Worker) -> ResidualState:
        """The residual starts at zero."""
        return with_learning(self.impute, ResidualState(residual=worker.zeros()), worker)

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        """One step of Top-k."""
        k = self.num_selected(worker)
        sent = take_largest_(state.residual, grad, k, code=self.value_code)
        return (yield from sum_sent(self.impute, sent, state, worker))
