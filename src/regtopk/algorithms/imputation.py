"""Imputation: what workers hold of an entry that only others sent, inferred from what these sent.

Any algorithm whose workers choose their entries for themselves can do it (docs/imputation.md). Its option
``impute`` is rho: a worker that did not send an entry is taken to hold rho times the mean of those that did.
"""

from torch import Tensor

from regtopk.core import Conversation, Promises, SenderSum, SparseGradient, SparseSum, Worker, impute_


def with_imputation(rho: float, promises: Promises) -> Promises:
    """What an algorithm promises if it imputes: one worker's residual then pays for another's entry."""
    if rho == 0:
        return promises
    promises -= {"one_sum"}  # receivers must know who sent an entry
    return promises - {"conserves"} | {"conserves_sum"} if "conserves" in promises else promises


def sum_sent(rho: float, sent: SparseGradient, residual: Tensor, worker: Worker) -> Conversation:
    """S + rho (1 - W) m, for which the residual pays; without imputation the sum S alone."""
    if rho == 0:
        return (yield from SparseSum(sent, worker.weight))
    return impute_(residual, sent, (yield from SenderSum(sent, worker.weight)), rho)
