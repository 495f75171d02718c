"""Top-k with error feedback: what RegTop-k corrects."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regtopk.core.algorithm import Conversation, Promise, Sparsifier
from regtopk.core.requests import SparseSum
from regtopk.core.selection import take_largest_
from regtopk.core.state import ResidualState
from regtopk.core.worker import Worker


@dataclass(frozen=True, kw_only=True)
class TopK(Sparsifier[ResidualState]):
    """Keep the k largest entries of the accumulated gradient; carry the rest (Section 1.1).

    a_n = e_n + g_n
    s_n = Top_k(|a_n|), send s_n * a_n, receive g = sum_n w_n (s_n * a_n)
    e_n := a_n - s_n * a_n

    Args:
        density: k / J in (0, 1]; or give ``k``.
        k: entries a worker sends.
        value_code: how values are coded on the wire.
    """

    name: ClassVar[str] = "topk"
    promises: ClassVar[frozenset[Promise]] = frozenset(
        {"conserves", "dense_at_full_density", "exact_k", "replicates"}
    )

    def init(self, worker: Worker) -> ResidualState:
        """The residual starts at zero."""
        return ResidualState(residual=worker.zeros())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        """One step of Top-k."""
        k = self.num_selected(worker)
        sent = take_largest_(state.residual, grad, k, code=self.value_code)
        aggregate: Tensor = yield SparseSum(sent, worker.weight)
        return aggregate
