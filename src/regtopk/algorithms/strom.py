"""Strom's threshold: a sign for every entry that has grown large enough."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.core import Conversation, ErrorFeedback, ResidualState, SparseSum, Worker, option, within
from regtopk.core.sparse import send_instead_, take_above_


@dataclass(frozen=True, kw_only=True)
class Strom(ErrorFeedback):
    """Scalable distributed training with a fixed threshold (Strom 2015).

    a_n = e_n + g_n
    s_n = {j : |a_nj| >= tau}, send (j, sign a_nj), receive g = sum_n w_n tau (s_n * sign a_n)
    e_n := a_n - tau (s_n * sign a_n)

    Per step, a worker sends at most tau of an entry. So tau must suit the size of the gradients: if they are
    much larger, the residual grows without end.

    Use it for: a historical baseline; tau must be tuned to the gradients.

    Args:
        tau: > 0, in units of the gradient, as a float32 holds it.

    Differs from the paper: |a| = tau is sent too. Index and sign are not packed into one word of 32 bits.

    Checked against the equations, programmed a second time. The paper's full text was not at hand.
    """

    name = "strom"
    promises = frozenset({"conserves", "replicates"})
    tau: float = option(0.01, within("[1.2e-38, 3.4e38]"))  # it travels as a float32

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        taken = take_above_(state.residual, grad, self.tau, worker.numel)
        sent = send_instead_(state.residual, taken, self.tau * taken.values.sign(), code="sign")
        return (yield from SparseSum(sent, worker.weight))
