"""SketchedSGD: find the largest entries of the sum in a sum of sketches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regtopk.algorithms.gtopk import among_largest
from regtopk.core.algorithm import Conversation, Promise, Sparsifier
from regtopk.core.codes import VALUE_CODES, quantise
from regtopk.core.exact import to_integers
from regtopk.core.options import check_choice, check_integer
from regtopk.core.random import uniform
from regtopk.core.requests import DenseSum
from regtopk.core.selection import take_at_
from regtopk.core.sparse import to_dense
from regtopk.core.state import ResidualState
from regtopk.core.worker import Worker

_COLUMNS_PER_ENTRY = 4


@dataclass(frozen=True, kw_only=True)
class Sketch(Sparsifier[ResidualState]):
    """Count sketches of the accumulated gradients, summed (SketchedSGD, Ivkin et al. 2019).

    a_n = e_n + g_n
    S(a)_rc = the sum of sigma_r(j) a_j over all entries j with h_r(j) = c,  r = 1..rows, c = 1..columns
    S(sum_n w_n a_n) = sum_n w_n S(a_n), a dense sum of rows · columns numbers
    s = Top_k of |median_r sigma_r(j) S_r,h_r(j)|, an estimate of the sum, the same for all
    send s * a_n, receive g = sum_n w_n (s * a_n), e_n := a_n - s * a_n

    It looks for the largest entries of the aggregate itself, as the oracle does, and no index travels; but an
    entry is found only if it stands out from what shares its cells.

    Args:
        density: k / J in (0, 1], of the support; or give ``k``.
        k: entries of the support.
        value_code: how values on the support are coded on the wire.
        rows: hash functions, >= 1; an odd number has a true median (of an even one, the lower middle).
        columns: cells of each, >= 1; 4 k if None.
        sketch_code: how the cells are coded; what that loses only blurs the estimate.
        seed: an integer; hashes are a function of (seed, t), so entries that collide do so in one step only.

    Differs from the paper, known from memory: that keeps its hash functions, corrects momentum, recovers 4 k
    candidates and sends the exact values of all of them, but uses the best k only.
    """

    name: ClassVar[str] = "sketch"
    promises: ClassVar[frozenset[Promise]] = frozenset(
        {"conserves", "dense_at_full_density", "replicates", "shared_support"}
    )
    rows: int = 5
    columns: int | None = None
    sketch_code: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        check_integer("rows", self.rows, at_least=1)
        if self.columns is not None:
            check_integer("columns", self.columns, at_least=1)
        check_choice("sketch_code", self.sketch_code, VALUE_CODES)
        check_integer("seed", self.seed)

    def init(self, worker: Worker) -> ResidualState:
        """The residual starts at zero."""
        return ResidualState(residual=worker.zeros())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        """One step of SketchedSGD."""
        k = self.num_selected(worker)
        columns = self.columns or _COLUMNS_PER_ENTRY * k
        accumulated = state.residual.add_(grad)
        integers, unit = to_integers(accumulated)  # a cell's sum is then the same in any order of addition
        cells = worker.zeros(self.rows * columns, dtype=torch.int64)
        for cell, sign in self._hashes(columns, worker):
            cells.scatter_add_(-1, cell.expand(integers.shape), integers * sign)
        sketch = quantise((cells * unit).to(worker.weight.dtype), self.sketch_code)
        summed = yield DenseSum(sketch, worker.weight, self.sketch_code)
        estimates = [summed[..., cell] * sign for cell, sign in self._hashes(columns, worker)]
        estimate = torch.stack(estimates).median(dim=0).values
        support = among_largest(estimate.abs(), k).nonzero()[..., -1].view(*estimate.shape[:-1], k)
        values = take_at_(accumulated, None, support, code=self.value_code)
        total = yield DenseSum(values, worker.weight, self.value_code)
        return to_dense(support, total, worker.numel)

    def _hashes(self, columns: int, worker: Worker) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each row, the cell and the sign, 1 or -1, of every entry: (J,) each."""
        for row in range(self.rows):
            at = torch.tensor(row, device=worker.weight.device)
            drawn = (2 * columns * uniform(at, self.seed, worker.step, worker.numel)).long()
            yield row * columns + drawn // 2, 1 - 2 * (drawn % 2)
