"""Hard threshold: error feedback with one constant threshold for all of training."""

import math
from dataclasses import dataclass

from torch import Tensor

from regtopk.core import Conversation, ErrorFeedback, ResidualState, SparseSum, Sparsifier, Worker
from regtopk.core.options import check_options, option, within
from regtopk.core.sparse import take_above_
from regtopk.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class HardThreshold(ErrorFeedback, Sparsifier[ResidualState]):
    """Hard-threshold sparsification (Sahu et al. 2021, "Rethinking gradient sparsification").

    a_n = e_n + g_n
    s_n = {j : |a_nj| >= lambda}, send s_n * a_n, receive g = sum_n w_n (s_n * a_n)
    e_n := a_n - s_n * a_n

    Top-k is optimal in every single step; a constant lambda aims at the error of a whole run at the same
    traffic. By default lambda is the paper's 1 / (2 sqrt k), with the k of the Top-k that it replaces.

    Use it for: a fixed threshold for all of training, so a density that falls as gradients do.

    Args:
        density, k, value_code: as in `Sparsifier`; lambda is computed from k.
        threshold: lambda > 0 itself, in units of the gradient, instead of a density or k.

    Checked against the authors' loop, transcribed: the same entries, and values that agree to rounding.
    """

    name = "hard-threshold"
    promises = frozenset({"conserves", "replicates"})
    threshold: float | None = option(None, within("(0, inf)"))

    def __post_init__(self) -> None:
        if self.threshold is None:
            super().__post_init__()
            return
        check_options(self)
        if self.density is not None or self.k is not None:
            raise ArgumentError(
                f"give threshold alone, or density or k to compute it from, got threshold={self.threshold}, "
                f"density={self.density}, k={self.k}"
            )

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        threshold = self.threshold or 1 / (2 * math.sqrt(self.num_selected(worker)))
        sent = take_above_(state.residual, grad, threshold, worker.numel, code=self.value_code)
        return (yield from SparseSum(sent, worker.weight))
