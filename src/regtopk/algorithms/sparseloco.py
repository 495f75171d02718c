"""SparseLoCo: the largest entries of every tile of what local steps changed, averaged over their senders."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regtopk.core import (
    Conversation,
    ResidualState,
    SenderSum,
    Sparsifier,
    Worker,
    check_integer,
    check_number,
    mean_of_senders,
)
from regtopk.core.tiles import from_tiles, take_largest_per_tile_, tiles_of


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(Sparsifier[ResidualState]):
    """SparseLoCo (Sarfi et al. 2025), as its public code does it.

    a_n = decay e_n + g_n                          g_n: what H local steps changed, theta_start - theta_n
    s_n = the k_t largest |a_n| of every tile of up to 64 x 64, send q_n = Q(s_n * a_n)
    e_n := a_n - q_n
    g = sum_n w_n q_n / (sum of the w_n of those that sent the entry), and zero where nobody did

    The mean over the senders makes an entry that one worker sends as large as one that all send. Nobody pays
    for that: with imputation at rho = 1 (docs/imputation.md) the aggregate is the same, and those that did
    not send take it out of their residual.

    It is meant for updates, with an outer learning rate of 1 and no outer momentum. The authors send 128
    entries of each tile: ``SparseLoCo(density=128 / 4096)``, or 64.

    Use it for: comparisons with the published method for rare exchanges of updates.

    Args:
        density: share of every tile, in (0, 1]: k_t = max(1, round(density entries)); or give ``k``.
        k: entries of all tiles together: density = k / J.
        value_code: how values are coded on the wire; what a code loses stays in the residual.
        decay: the part of the residual that is kept per step, in [0, 1].
        tile: the most entries a side of a tile may have, >= 1. Sides that are longer are cut into as few
            pieces as possible, whose lengths differ by at most one. A vector is cut into runs.

    Differs from the paper: that prints the sum over all workers divided by their number, whose steps are
    up to N times shorter. Differs from the authors' code: its 2-bit values are four bins of 1.5 standard
    deviations around the mean of a whole tensor's values, each decoded to its mean; here "2bit" is a sign and
    one of two magnitudes, the means of the small and the large ones, of each 128 values. The code cuts a side
    into its largest divisor of up to 64, which is the same where 64 divides it, and takes no parameters of
    more than two dimensions; here these are matrices of their first dimension against the others. It
    multiplies g_n by the outer learning rate, which is 1, a second time. Indices travel in the cluster's
    index code, and in weighted means workers count by their weight.
    """

    name: ClassVar[str] = "sparseloco"
    promises = frozenset({"replicates"})
    value_code: str = "2bit"
    decay: float = 0.95
    tile: int = 64

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_number("decay", self.decay, "in [0, 1]", lambda x: 0 <= x <= 1)
        check_integer("tile", self.tile, at_least=1)

    def init(self, worker: Worker) -> ResidualState:
        """The residual starts at zero."""
        self.num_selected(worker)  # refuses a k that does not fit
        return ResidualState(residual=worker.zeros())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        """One exchange."""
        groups = tiles_of(worker.layout, self.tile)
        density = self.num_selected(worker) / worker.numel
        residual = state.residual.mul_(self.decay)
        new = [group.read(grad) for group in groups]
        sent = take_largest_per_tile_(residual, new, groups, density, code=self.value_code)
        mean = mean_of_senders((yield from SenderSum(sent, worker.weight)))
        return from_tiles(mean, groups)
