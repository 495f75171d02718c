"""SketchedSGD: find the largest entries of the sum in a sum of sketches."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from regtopk.core import Conversation, DenseSum, ErrorFeedback, ResidualState, Sparsifier, Worker, to_integers
from regtopk.core.codes import VALUE_CODES, quantise
from regtopk.core.options import integer, one_of, option
from regtopk.core.random import uniform
from regtopk.core.sparse import find_largest_, take_at_, to_dense

_COLUMNS_PER_ENTRY = 4
_MOST_ROWS = 52  # each row takes one bit of a random number


@dataclass(frozen=True, kw_only=True)
class Sketch(ErrorFeedback, Sparsifier[ResidualState]):
    """Count sketches of the accumulated gradients, summed (SketchedSGD, Ivkin et al. 2019).

    a_n = e_n + g_n
    S(a)_rc = the sum of sigma_r(j) a_j over all entries j with h_r(j) = c,  r = 1..rows, c = 1..columns
    S(sum_n w_n a_n) = sum_n w_n S(a_n), a dense sum of rows · columns numbers
    s = Top_k of |median_r sigma_r(j) S_r,h_r(j)|, an estimate of the sum, the same for all
    send s * a_n, receive g = sum_n w_n (s * a_n), e_n := a_n - s * a_n

    An entry is found only if it stands out from the entries that share its cells. The hash functions are
    rotations: the entries are cut into blocks as long as a row of the sketch, and h_r rotates each block by a
    random number of cells. So a sketch is made by reading memory in order. Two entries of different blocks
    share a cell with probability 1 / columns; two entries of one block never do.

    Use it for: many workers and few large entries of the aggregate.

    Args:
        density, k, value_code: as in `Sparsifier`.
        rows: number of hash functions, 1 to 52.
        columns: cells per row, >= 1; 4 k if None.
        sketch_code: how the cells are coded; what a lossy code loses only blurs the estimate.
        seed: an integer; hashes are a function of (seed, t).

    Differs from the paper, which keeps its hash functions, corrects momentum, and sends the exact values of
    4 k candidates to use the best k.

    Checked against a count sketch with independent hashes. The paper's full text was not at hand.
    """

    name = "sketch"
    promises = frozenset({"conserves", "dense_at_full_density", "replicates", "shared_support"})
    rows: int = option(5, integer(at_least=1, at_most=_MOST_ROWS))
    columns: int | None = option(None, integer(at_least=1))
    sketch_code: str = option("float32", one_of(*VALUE_CODES))
    seed: int = option(0, integer())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        columns = self.columns or _COLUMNS_PER_ENTRY * k
        accumulated = state.residual.add_(grad)
        sketch = quantise(self._sketch(accumulated, columns, worker), self.sketch_code)
        summed = yield from DenseSum(sketch, worker.weight, self.sketch_code)
        estimate = self._estimate(summed, columns, worker)
        support = find_largest_(torch.zeros_like(estimate), estimate, k)
        values = take_at_(accumulated, None, support, code=self.value_code)
        total = yield from DenseSum(values, worker.weight, self.value_code)
        return to_dense(support, total, worker.numel)

    def _sketch(self, vector: Tensor, columns: int, worker: Worker) -> Tensor:
        """The cells, (..., rows · columns)."""
        integers, unit = to_integers(vector)  # the sum of a cell is then the same in any order of addition
        num_blocks = math.ceil(worker.numel / columns)
        padding = 0, num_blocks * columns - worker.numel
        blocks = pad(integers, padding).unflatten(-1, (num_blocks, columns))
        cell = torch.arange(columns, device=vector.device)
        rows = []
        for turn, sign in self._hashes(columns, num_blocks, worker):
            signed = blocks * pad(sign, padding).view(num_blocks, columns)
            entry_of_cell = (cell - turn.unsqueeze(-1)) % columns
            rows.append(signed.gather(-1, entry_of_cell.expand(signed.shape)).sum(-2))
        return (torch.cat(rows, -1) * unit).to(vector.dtype)

    def _estimate(self, sketch: Tensor, columns: int, worker: Worker) -> Tensor:
        """The median over the rows of their estimates of every entry, (..., J)."""
        num_blocks = math.ceil(worker.numel / columns)
        entry = torch.arange(worker.numel, device=sketch.device)
        rows = sketch.unflatten(-1, (self.rows, columns)).unbind(-2)
        estimates = []
        for row, (turn, sign) in zip(rows, self._hashes(columns, num_blocks, worker), strict=True):
            cell = (entry + turn[entry // columns]) % columns
            estimates.append(row[..., cell] * sign)
        return _lower_median(estimates)

    def _hashes(self, columns: int, num_blocks: int, worker: Worker) -> Iterator[tuple[Tensor, Tensor]]:
        """For each row: by how many cells each block is rotated, and the sign, 1 or -1, of every entry."""
        draws = torch.arange(self.rows + 1, device=worker.weight.device)
        bits = (2**self.rows * uniform(draws[-1], self.seed, worker.step, worker.numel)).long()
        for row in range(self.rows):
            turn = (columns * uniform(draws[row], self.seed, worker.step, num_blocks)).long()
            yield turn, 1 - (bits >> row) % 2 * 2


def _lower_median(tensors: list[Tensor]) -> Tensor:
    """The lower median of each entry, by an odd-even sort: torch.median is slow over a few tensors."""
    ordered = list(tensors)
    for turn in range(len(ordered)):
        for n in range(turn % 2, len(ordered) - 1, 2):
            pair = ordered[n], ordered[n + 1]
            ordered[n], ordered[n + 1] = torch.minimum(*pair), torch.maximum(*pair)
    return ordered[(len(ordered) - 1) // 2]
