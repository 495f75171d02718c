"""Top-k with error feedback: what RegTop-k corrects."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.algorithms.own_choice import OwnChoice
from regtopk.core import Conversation, ErrorFeedback, ResidualState, Worker, take_largest_


@dataclass(frozen=True, kw_only=True)
class TopK(ErrorFeedback, OwnChoice[ResidualState]):
    """Keep the k largest entries of the accumulated gradient; carry the rest (Section 1.1).

    a_n = e_n + g_n
    s_n = Top_k(|a_n|), send s_n * a_n, receive g = sum_n w_n (s_n * a_n)
    e_n := a_n - s_n * a_n

    Use it for: the plain baseline of every comparison.

    Args:
        density, k, value_code, impute, returned: as in `OwnChoice`.
    """

    name = "topk"

    def init(self, worker: Worker) -> ResidualState:
        return self.with_owed(super().init(worker), worker)

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        sent = take_largest_(state.residual, grad, k, code=self.sent_code)
        return (yield from self.sum_sent(sent, state, worker))
