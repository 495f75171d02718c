"""Dense: send everything. The yardstick."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.core import Algorithm, Conversation, DenseSum, NoState, Promises, ResidualState, Worker
from regtopk.core.codes import VALUE_CODES, is_lossless, quantise
from regtopk.core.options import one_of, option


@dataclass(frozen=True, kw_only=True)
class Dense(Algorithm[NoState | ResidualState]):
    """Distributed SGD without sparsification.

    g = sum_n w_n g_n                                                         (the paper's Eq. 1)
    with a lossy value code:  a_n = e_n + g_n, g = sum_n w_n Q(a_n), e_n := a_n - Q(a_n)

    Use it for: the yardstick, and the right choice on a fast link.

    Args:
        value_code: how values are coded on the wire.
    """

    name = "dense"
    value_code: str = option("float32", one_of(*VALUE_CODES))

    @property
    def promises(self) -> Promises:
        """With a lossy value code, a step is biased by what the code leaves in the residual."""
        if not is_lossless(self.value_code):
            return frozenset({"conserves", "replicates"})
        return frozenset({"conserves", "replicates", "unbiased"})

    def init(self, worker: Worker) -> NoState | ResidualState:
        return NoState() if is_lossless(self.value_code) else ResidualState(worker.zeros())

    def exchange(self, grad: Tensor, state: NoState | ResidualState, worker: Worker) -> Conversation:
        """Send the gradient as it is, or coded."""
        sent = grad
        if isinstance(state, ResidualState):
            sent = quantise(state.residual.add_(grad), self.value_code)
            state.residual.sub_(sent)
        return (yield from DenseSum(sent, worker.weight, self.value_code))
