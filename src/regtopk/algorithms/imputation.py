"""Imputation: what workers hold of an entry that only others sent, inferred from what these sent.

Any algorithm whose workers choose their entries for themselves can do it (docs/imputation.md).
"""

from typing import Any, Protocol

from torch import Tensor

from regtopk.core import (
    Conversation,
    Promises,
    SenderSum,
    SparseGradient,
    SparseSum,
    Worker,
    check_number,
    impute_,
)

Impute = float


class WithResidual(Protocol):
    """A state that has a residual."""

    residual: Tensor


def check_impute(impute: Any) -> None:
    """Refuse what is not a part of the senders' mean."""
    check_number("impute", impute, "in [0, 1]", lambda x: 0 <= x <= 1)


def sum_sent(impute: Impute, sent: SparseGradient, state: WithResidual, worker: Worker) -> Conversation:
    """S + impute (1 - W) m, and the state's residual pays for it; without imputation the sum S alone."""
    if impute == 0:
        return (yield from SparseSum(sent, worker.weight))
    return impute_(state.residual, sent, (yield from SenderSum(sent, worker.weight)), impute)


def with_imputation(impute: Impute, promises: Promises) -> Promises:
    """What an algorithm promises if it imputes: one worker's residual then pays for another's entry."""
    if impute == 0 or "conserves" not in promises:
        return promises
    return promises - {"conserves"} | {"conserves_sum"}
