"""Global Top-k: the paper's oracle, which knows the aggregate before anything is sent."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.core import Conversation, DenseSum, ErrorFeedback, Peek, ResidualState, Sparsifier, Worker
from regtopk.core.sparse import take_at_, to_dense


@dataclass(frozen=True, kw_only=True)
class GlobalTopK(ErrorFeedback, Sparsifier[ResidualState]):
    """Top-k of the true aggregate (Section 3.1): the best any selection could do.

    a_n = e_n + g_n, a = sum_n w_n a_n        (known to no worker: asked through `Peek`)
    s = Top_k(|a|), the same on all workers
    send s * a_n, receive g = sum_n w_n (s * a_n), e_n := a_n - s * a_n

    Only a simulator can answer `Peek`. The bytes counted are those of the sum on the shared support.

    Use it for: the oracle, in the simulator: how much a better selection could gain.

    Args:
        density, k, value_code: as in `Sparsifier`.
    """

    name = "global-topk"
    promises = frozenset({"conserves", "dense_at_full_density", "exact_k", "replicates", "shared_support"})

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        accumulated = state.residual + grad  # a new tensor: a cluster that refuses to peek changes nothing
        aggregate = yield from Peek(accumulated, worker.weight)
        state.residual = accumulated
        indices = aggregate.abs().topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
        values = take_at_(state.residual, None, indices, code=self.value_code)
        total = yield from DenseSum(values, worker.weight, self.value_code)
        return to_dense(indices, total, worker.numel)
