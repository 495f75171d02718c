"""Dense: send everything. The yardstick."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.core import Algorithm, Conversation, DenseSum, NoState, Promises, ResidualState, Worker
from regtopk.core.codes import VALUE_CODES, is_lossless, quantise
from regtopk.core.options import one_of, option


@dataclass(frozen=True, kw_only=True)
class Dense(Algorithm[NoState | ResidualState]):
    """Distributed SGD without sparsification.

    g = sum_n w_n g_n                                                         (the paper's Eq. 1)
    with a lossy value_code:  a_n = e_n + g_n, S = sum_n w_n Q(a_n), e_n := a_n - Q(a_n)
    with a lossy sum_code:    g = Q'(S), and the worker m that summed an entry: e_m := e_m + (S - g) / w_m

    Use it for: the yardstick, and the right choice on a fast link. Coded both ways, a worker receives as many
    bytes at any number of workers.

    Args:
        value_code: how values are coded on the wire.
        sum_code: how the sums are coded on the way back.
    """

    name = "dense"
    value_code: str = option("float32", one_of(*VALUE_CODES))
    sum_code: str = option("float32", one_of(*VALUE_CODES))

    @property
    def promises(self) -> Promises:
        """With a lossy code, a step is biased by what the code leaves in a residual."""
        if not is_lossless(self.sum_code):
            return frozenset({"conserves_sum", "replicates"})
        if not is_lossless(self.value_code):
            return frozenset({"conserves", "replicates"})
        return frozenset({"conserves", "replicates", "unbiased"})

    def init(self, worker: Worker) -> NoState | ResidualState:
        is_exact = is_lossless(self.value_code) and is_lossless(self.sum_code)
        return NoState() if is_exact else ResidualState(worker.zeros())

    def exchange(self, grad: Tensor, state: NoState | ResidualState, worker: Worker) -> Conversation:
        """Send the gradient as it is, or coded."""
        sent, loss = grad, None
        if isinstance(state, ResidualState):
            accumulated = state.residual.add_(grad)
            sent = quantise(accumulated, self.value_code)
            sent = sent.clone() if sent is accumulated else sent
            state.residual.sub_(sent)
            loss = None if is_lossless(self.sum_code) else torch.empty_like(state.residual)
        total = yield from DenseSum(sent, worker.weight, self.value_code, self.sum_code, loss)
        if isinstance(state, ResidualState) and loss is not None:
            state.residual.add_(loss)
        return total
