"""SparseLoCo: the largest entries of every tile of what local steps changed, averaged over their senders."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.core import Conversation, ErrorFeedback, ResidualState, SenderSum, Sparsifier, Worker
from regtopk.core.codes import VALUE_CODES
from regtopk.core.options import integer, one_of, option, within
from regtopk.core.requests import mean_of_senders
from regtopk.core.tiles import from_tiles, take_largest_per_tile_, tiles_of


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(ErrorFeedback, Sparsifier[ResidualState]):
    """SparseLoCo (Sarfi et al. 2025), as its public code does it.

    a_n = decay e_n + g_n                          g_n: what H local steps changed, theta_start - theta_n
    s_n = the k_t largest |a_n| of every tile of up to 64 x 64, send q_n = Q(s_n * a_n)
    e_n := a_n - q_n
    g = sum_n w_n q_n / (sum of the w_n of those that sent the entry), and zero where nobody did

    The mean over the senders makes an entry that one worker sends as large as one that all send, and nobody
    pays for that; imputation at rho = 1 (docs/imputation.md) has the same aggregate and pays. It is meant for
    updates, with an outer learning rate of 1 and no outer momentum. The authors send 128 entries of each
    tile: ``SparseLoCo(density=128 / 4096)``, or 64.

    Use it for: comparisons with the published method for rare exchanges of updates.

    Args:
        density, k, value_code: as in `Sparsifier`; k_t = max(1, round(density entries)), density = k / J.
        decay: the part of the residual that is kept per step, in [0, 1].
        tile: the most entries a side of a tile may have, >= 1 (`core.tiles` says how sides are cut).

    Differs from the paper, which prints the sum over all workers divided by their number, and from the code:
    its 2-bit values are four bins around the mean of a whole tensor, and sides are cut as in DeMo's.
    """

    name = "sparseloco"
    promises = frozenset({"replicates"})
    value_code: str = option("2bit", one_of(*VALUE_CODES))
    decay: float = option(0.95, within("[0, 1]"))
    tile: int = option(64, integer(at_least=1))

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        groups = tiles_of(worker.layout, self.tile)
        density = self.num_selected(worker) / worker.numel
        residual = state.residual.mul_(self.decay)
        new = [group.read(grad) for group in groups]
        sent = take_largest_per_tile_(residual, new, groups, density, code=self.value_code)
        mean = mean_of_senders((yield from SenderSum(sent, worker.weight)))
        return from_tiles(mean, groups)
