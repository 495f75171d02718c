"""Strom's threshold: a sign for every entry that has grown large enough."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regtopk.core import (
    Algorithm,
    Conversation,
    ResidualState,
    SparseSum,
    Worker,
    check_number,
    send_instead_,
    take_above_,
)

_SINGLE = torch.finfo(torch.float32)  # tau travels as a float32


@dataclass(frozen=True, kw_only=True)
class Strom(Algorithm[ResidualState]):
    """Scalable distributed training with a fixed threshold (Strom 2015).

    a_n = e_n + g_n
    s_n = {j : |a_nj| >= tau}, send (j, sign a_nj), receive g = sum_n w_n tau (s_n * sign a_n)
    e_n := a_n - tau (s_n * sign a_n)

    Per step, a worker sends at most tau of an entry. So tau must suit the size of the gradients: if they are
    much larger, the residual grows without end.

    Use it for: a historical baseline; tau must be tuned to the gradients.

    Args:
        tau: > 0, in units of the gradient, as a float32 holds it.
        max_density: the most entries a worker sends, as a share of J in (0, 1]; of more, the first are sent
            and the others stay in the residual.

    Differs from the paper: |a| = tau is sent too. Index and sign are not packed into one word of 32 bits, but
    coded: one bit for the sign, the index in the cluster's index code, and two floats (here both tau) per 128
    entries.

    Checked against the equations, programmed a second time: no difference. The paper's full text was not at
    hand.
    """

    name: ClassVar[str] = "strom"
    promises = frozenset({"conserves", "replicates"})
    tau: float = 0.01
    max_density: float = 1.0

    def __post_init__(self) -> None:
        """Check the options."""
        rule = f"in {_SINGLE.tiny:.3g}..{_SINGLE.max:.3g}"
        check_number("tau", self.tau, rule, lambda x: _SINGLE.tiny <= x <= _SINGLE.max)
        check_number("max_density", self.max_density, "in (0, 1]", lambda x: 0 < x <= 1)

    def init(self, worker: Worker) -> ResidualState:
        """The residual starts at zero."""
        return ResidualState(residual=worker.zeros())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        """One step of Strom's method."""
        capacity = max(1, round(self.max_density * worker.numel))
        taken = take_above_(state.residual, grad, self.tau, capacity)
        sent = send_instead_(state.residual, taken, self.tau * taken.values.sign(), code="sign")
        return (yield from SparseSum(sent, worker.weight))
