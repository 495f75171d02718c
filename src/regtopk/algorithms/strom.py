"""Strom's threshold: a sign for every entry that has grown large enough."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.core.algorithm import Conversation, ErrorFeedback
from regtopk.core.options import check_number
from regtopk.core.requests import SparseSum
from regtopk.core.selection import send_instead_, take_above_
from regtopk.core.state import ResidualState
from regtopk.core.worker import Worker

_SINGLE = torch.finfo(torch.float32)  # tau travels as a float32


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
    tau: float = 0.01

    def __post_init__(self) -> None:
        """Check the options."""
        rule = f"in {_SINGLE.tiny:.3g}..{_SINGLE.max:.3g}"
        check_number("tau", self.tau, rule, lambda x: _SINGLE.tiny <= x <= _SINGLE.max)

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        """One step of Strom's method."""
        taken = take_above_(state.residual, grad, self.tau, worker.numel)
        sent = send_instead_(state.residual, taken, self.tau * taken.values.sign(), code="sign")
        return (yield from SparseSum(sent, worker.weight))
