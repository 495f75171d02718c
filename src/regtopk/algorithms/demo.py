"""DeMo: each worker keeps its own momentum, and sends the largest cosine coefficients of it."""

from dataclasses import dataclass

from torch import Tensor

from regtopk.core import Conversation, SenderSum, Sparsifier, State, Worker, mean_of_senders, per_worker
from regtopk.core.dct import LONGEST_SIDE, dct, inverse_dct
from regtopk.core.options import integer, option, true_or_false, within
from regtopk.core.tiles import from_tiles, take_largest_per_tile_, tiles_of


@dataclass
class DeMoState(State):
    """The cosine coefficients of the momentum; each tile's lie where its entries lie in the gradient."""

    momentum: Tensor = per_worker("weighted_sum")


@dataclass(frozen=True, kw_only=True)
class DeMo(Sparsifier[DeMoState]):
    """Decoupled momentum (DeMo, Peng, Quesnelle, Kingma 2024).

    M_n := decay M_n + DCT(g_n)                    DCT-II, orthonormal, of every tile of up to 64 x 64
    S_n = the k_t largest |M_n| of every tile, send S_n * M_n
    M_n := M_n - S_n * M_n                         what is sent leaves the momentum
    Q = sum_n w_n (S_n * M_n) / (sum of the w_n of those that sent the coefficient), zero where nobody did
    g = sign(DCT^-1(Q))

    M_n are the coefficients of the paper's momentum: the transform is linear, so they can be kept in its
    place. Momentum and sign are part of the algorithm, so the optimizer must be plain SGD, with an Adam-like
    learning rate. Its weight decay is then the paper's, p := (1 - lr wd) p - lr g. Do not clip g. The
    authors send 32 coefficients of each tile: ``DeMo(density=32 / 4096)``.

    Use it for: comparisons with a method for transformers that exchanges in every step and needs no Adam.

    Args:
        density, k, value_code: as in `Sparsifier`; k_t = max(1, round(density entries)), density = k / J.
        decay: the part of the momentum that is kept per step, in [0, 1].
        tile: the most entries a side of a tile may have, 1 to 64 (`core.tiles` says how sides are cut).
        sign: whether the aggregate is the sign; otherwise it is DCT^-1(Q) itself.

    Differs from the authors' code: that sends k coefficients of every tile however small it is, and cuts a
    side into its largest divisor of up to 64 (the same where 64 divides it).

    Checked against the authors' code, transcribed: the same signs in 300 steps, but for 79 in 100,000.
    """

    name = "demo"
    has_own_momentum = True
    promises = frozenset({"replicates"})
    decay: float = option(0.999, within("[0, 1]"))
    tile: int = option(LONGEST_SIDE, integer(at_least=1, at_most=LONGEST_SIDE))
    sign: bool = option(True, true_or_false)

    def init(self, worker: Worker) -> DeMoState:
        self.num_selected(worker)  # refuses a k that does not fit
        return DeMoState(momentum=worker.zeros())

    def exchange(self, grad: Tensor, state: DeMoState, worker: Worker) -> Conversation:
        groups = tiles_of(worker.layout, self.tile)
        density = self.num_selected(worker) / worker.numel
        momentum = state.momentum.mul_(self.decay)
        new = [dct(group.read(grad).to(momentum.dtype)) for group in groups]
        sent = take_largest_per_tile_(momentum, new, groups, density, code=self.value_code)
        mean = mean_of_senders((yield from SenderSum(sent, worker.weight)))
        aggregate = from_tiles(mean, groups, inverse_dct)
        return aggregate.sign_() if self.sign else aggregate
