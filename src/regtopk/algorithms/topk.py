"""Top-k with error feedback: what RegTop-k corrects."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regtopk.core import Conversation, ResidualState, SparseSum, Sparsifier, Worker, take_largest_


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
    """

    name: ClassVar[str] = "topk"
    promises = frozenset({"conserves", "dense_at_full_density", "exact_k", "replicates"})

    def init(self, worker: Worker) -> ResidualState:
        """The residual starts at zero."""
        return ResidualState(residual=worker.zeros())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        """One step of Top-k."""
        k = self.num_selected(worker)
        sent = take_largest_(state.residual, grad, k, code=self.value_code)
        return (yield from SparseSum(sent, worker.weight))
