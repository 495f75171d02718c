"""Random-k: all workers send the same k entries, drawn from a shared seed, so no index travels."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.core import Conversation, DenseSum, ErrorFeedback, ResidualState, Sparsifier, Worker, take_at_
from regtopk.core.options import integer, option
from regtopk.core.random import random_subset
from regtopk.core.sparse import to_dense


@dataclass(frozen=True, kw_only=True)
class RandomK(ErrorFeedback, Sparsifier[ResidualState]):
    """A shared random support with error feedback.

    a_n = e_n + g_n
    s = k distinct entries drawn by (seed, t), the same on all workers
    send s * a_n, receive g = sum_n w_n (s * a_n), e_n := a_n - s * a_n

    Use it for: no index and no selection at all; good with low-bit values.

    Args:
        density, k, value_code: as in `Sparsifier`.
        seed: an integer; the draw is a function of (seed, t).
    """

    name = "randomk"
    promises = frozenset({"conserves", "dense_at_full_density", "exact_k", "replicates", "shared_support"})
    seed: int = option(0, integer())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        indices = random_subset(worker.numel, k, self.seed, worker.step, grad.device)
        values = take_at_(state.residual, grad, indices, code=self.value_code)
        total = yield from DenseSum(values, worker.weight, self.value_code)
        return to_dense(indices.expand(total.shape), total, worker.numel)
