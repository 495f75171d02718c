"""ScaleCom: one worker's largest entries are everybody's, so that sums need no indices."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.core import Broadcast, DenseSum, ResidualState, find_largest_, option, take_at_, to_dense, within
from regtopk.core.algorithm import Conversation, ErrorFeedback, Promises, Sparsifier
from regtopk.core.worker import Worker


@dataclass(frozen=True, kw_only=True)
class ScaleCom(ErrorFeedback, Sparsifier[ResidualState]):
    """Cyclic local Top-k with a low-pass filter on the residual (Chen et al. 2020).

    a_n = e_n + g_n
    s = Top_k(|a_l|) of the leader l, who is another worker every step (t mod N), broadcast to all
    send s * a_n, receive g = sum_n w_n (s * a_n)
    e_n := (1 - beta) e_n + beta (a_n - s * a_n)

    Use it for: many workers whose gradients look alike.

    Args:
        density, k, value_code: as in `Sparsifier`.
        beta: the factor of the low-pass filter, in (0, 1]; 1 is plain error feedback, the paper's is 0.1.

    Differs from the paper: the leader's Top-k is that of the whole vector, not chunk by chunk.

    Checked against the equations, programmed a second time: the same to rounding.
    """

    name = "scalecom"
    beta: float = option(1.0, within("(0, 1]"))

    @property
    def promises(self) -> Promises:
        """A filtered residual is not conserved."""
        if self.beta < 1:
            return frozenset({"exact_k", "replicates", "shared_support"})
        return frozenset({"conserves", "dense_at_full_density", "exact_k", "replicates", "shared_support"})

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        k, leader = self.num_selected(worker), worker.senders[0]
        accumulated = state.residual.clone()
        own = find_largest_(accumulated, grad, k)
        indices = yield from Broadcast(own, leader, worker.numel)
        values = take_at_(accumulated, None, indices, code=self.value_code)
        state.residual.mul_(1 - self.beta).add_(self.beta * accumulated)
        total = yield from DenseSum(values, worker.weight, self.value_code)
        return to_dense(indices, total, worker.numel)
