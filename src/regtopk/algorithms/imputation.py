"""Imputation: what workers hold of an entry that only others sent, inferred from what these sent.

Any algorithm whose workers choose their entries for themselves can do it (docs/imputation.md).
"""

from typing import Any, Literal, Protocol, cast

from torch import Tensor

from regtopk.core import (
    Conversation,
    Promises,
    SenderSum,
    SparseGradient,
    SparseSum,
    StateT,
    Worker,
    check_number,
    extended,
    impute_,
    per_worker,
    shared,
    slope_of_absent,
)

Impute = float | Literal["learned"]

_SMOOTHING = 0.9  # the part of the learned rho that a step leaves as it was
_RULES = {"slope": per_worker("reset"), "rho": shared()}


class WithResidual(Protocol):
    """A state that has a residual."""

    residual: Tensor


class Learned(WithResidual, Protocol):
    """What a state holds if rho is learned: (..., 1) each."""

    slope: Tensor  # this worker's share of the last step's, which travels with the next message
    rho: Tensor  # from the slopes so far, the same on all ranks


def check_impute(impute: Any) -> None:
    """Refuse what is neither a part of the senders' mean nor "learned"."""
    if impute != "learned":
        check_number("impute", impute, "in [0, 1] or 'learned'", lambda x: 0 <= x <= 1)


def with_imputation(impute: Impute, promises: Promises) -> Promises:
    """What an algorithm promises if it imputes: one worker's residual then pays for another's entry."""
    if impute == 0:
        return promises
    promises -= {"one_sum"}  # receivers must know who sent an entry
    return promises - {"conserves"} | {"conserves_sum"} if "conserves" in promises else promises


def with_learning(impute: Impute, state: StateT, worker: Worker) -> StateT:
    """The state before the first step, with what a learned rho needs; it starts at zero."""
    if impute != "learned":
        return state
    rho = worker.weight.new_zeros(*worker.batch_shape[:-1], 1)
    return extended(state, _RULES, slope=worker.zeros(1), rho=rho)


def sum_sent(impute: Impute, sent: SparseGradient, state: WithResidual, worker: Worker) -> Conversation:
    """S + rho (1 - W) m, and the state's residual pays for it; without imputation the sum S alone.

    "learned": the workers' shares of the last step's slope come with their messages, and

        rho := 0.9 rho + 0.1 min(1, max(0, sum_n w_n slope_n))

    is used at once. A worker sends one number more per step, in a frame of its own.
    """
    if impute == 0:
        return (yield from SparseSum(sent, worker.weight))
    if impute != "learned":
        return impute_(state.residual, sent, (yield from SenderSum(sent, worker.weight)), impute)
    learned = cast("Learned", state)
    summed = yield from SenderSum(sent, worker.weight, numbers=learned.slope)
    assert summed.numbers is not None
    slope = summed.numbers.view(learned.rho.shape).clamp(0, 1)
    learned.rho = _SMOOTHING * learned.rho + (1 - _SMOOTHING) * slope
    learned.slope = slope_of_absent(state.residual, sent, summed)
    return impute_(state.residual, sent, summed, learned.rho.view(summed.numbers.shape))
