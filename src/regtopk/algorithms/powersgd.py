"""PowerSGD: matrices travel as two thin factors, found by one step of a power iteration."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from regtopk.core import Algorithm, Conversation, DenseSum, Layout, ResidualState, Worker, shared, uniform
from regtopk.core.codes import VALUE_CODES, is_lossless, quantise
from regtopk.core.options import integer, one_of, option
from regtopk.core.tiles import TileGroup, tiles_of

MIN_SAVING = 2  # what two factors make less than so many times smaller is sent as it is


@dataclass
class PowerSGDState(ResidualState):
    """The residual, and the factors Q that the next step begins with, one after the other."""

    factors: Tensor = shared()


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Algorithm[PowerSGDState]):
    """Low-rank sums with error feedback and a warm start (PowerSGD, Vogels, Karimireddy, Jaggi 2019).

    a_n = e_n + g_n
    A_n: a parameter's a_n as a matrix, b x c
    P = orth(sum_n w_n A_n orth(Q))                orth: an orthonormal basis of the columns, `rank` many
    Q := sum_n w_n A_n' P, g = P Q'                Q is where the next step begins
    e_n := a_n - g

    Vectors, and matrices that two factors do not make half as large, are sums of a_n as it is. What a value
    code loses stays in e_n. A worker sends and receives rank (b + c) numbers for a matrix, at any number of
    workers, in two sums. Last bits may depend on the number of threads.

    Use it for: comparisons with the low-rank method that torch ships as a hook; many workers.

    Args:
        rank: columns of a factor, >= 1. The paper has 1 to 4.
        value_code: how factors and vectors are coded on the wire, and their sums on the way back.
        seed: an integer, of the first Q.

    Differs from torch's hook, which sends everything in the first 1,000 steps unless told otherwise, and
    whose e_n of vectors is their distance from the mean: a sum of zero. The first Q is uniform, not normal.

    Checked against torch's powerSGD_hook on two ranks, from the same Q: the same to rounding.
    """

    name = "powersgd"
    promises = frozenset({"conserves_sum"})
    rank: int = option(4, integer(at_least=1))
    value_code: str = option("float32", one_of(*VALUE_CODES))
    seed: int = option(0, integer())

    def init(self, worker: Worker) -> PowerSGDState:
        groups, _ = _cut(worker.layout, self.rank)
        size = sum(len(group.parts) * group.shape[1] for group in groups) * self.rank
        first = uniform(worker.index.new_zeros(()), self.seed, 0, size) - 0.5
        return PowerSGDState(worker.zeros(), first.to(worker.weight))

    def exchange(self, grad: Tensor, state: PowerSGDState, worker: Worker) -> Conversation:
        groups, rest = _cut(worker.layout, self.rank)
        rest, num_rest = rest.to(grad.device), len(rest)
        residual = state.residual.add_(grad)
        right = [torch.linalg.qr(q).Q for q in _unpack(state.factors, groups, 1, self.rank)]
        left = _products(residual, groups, right, is_transposed=False)
        request = self._sum_of(torch.cat([residual[..., rest], left], -1), worker)
        total = yield from request
        aggregate = total.new_zeros(worker.numel)
        if groups:
            basis = [torch.linalg.qr(p).Q for p in _unpack(total[num_rest:], groups, 0, self.rank)]
            projected = _products(residual, groups, basis, is_transposed=True)
            state.factors = yield from self._sum_of(projected, worker)
            for group, p, q in zip(groups, basis, _unpack(state.factors, groups, 1, self.rank), strict=True):
                group.write_(aggregate, p @ q.mT)
            residual.sub_(aggregate)
        arrived = request.tensor if request.loss is None else request.tensor - request.loss
        residual[..., rest] -= arrived[..., :num_rest]
        aggregate[rest] = total[:num_rest]
        return aggregate

    def _sum_of(self, numbers: Tensor, worker: Worker) -> DenseSum:
        """The request of a sum, coded both ways."""
        sent = quantise(numbers, self.value_code)
        loss = None if is_lossless(self.value_code) else torch.zeros_like(sent)
        return DenseSum(sent, worker.weight, self.value_code, self.value_code, loss)


@lru_cache(maxsize=256)
def _cut(layout: Layout, rank: int) -> tuple[tuple[TileGroup, ...], Tensor]:
    """Which matrices travel as factors, by shape, and the indices of all other entries."""
    whole = tiles_of(layout, side=max(1, layout.numel))  # one tile for each parameter
    groups = tuple(g for g in whole if rank * sum(g.shape) * MIN_SAVING < math.prod(g.shape))
    is_outside = torch.ones(layout.numel, dtype=torch.bool)
    for group in groups:
        for matrices in group.in_place(is_outside):
            matrices.fill_(False)
    return groups, is_outside.nonzero().flatten()


def _unpack(flat: Tensor, groups: Sequence[TileGroup], side: int, rank: int) -> list[Tensor]:
    """The left (side 0) or right (1) factors of each group, (number, its length, rank), out of a vector."""
    parts = flat.split([len(group.parts) * group.shape[side] * rank for group in groups])
    return [part.view(-1, group.shape[side], rank) for group, part in zip(groups, parts, strict=True)]


def _products(
    vectors: Tensor, groups: Sequence[TileGroup], factors: list[Tensor], *, is_transposed: bool
) -> Tensor:
    """Matrices times factors, of each worker's vector: (..., J) gives (..., m).

    Workers are taken one by one: a product of a larger batch need not have the same bits.
    """
    if not groups:
        return vectors[..., :0]
    rows = []
    for vector in vectors.view(-1, vectors.shape[-1]):
        matrices = [group.read(vector) for group in groups]
        products = [
            (matrix.mT if is_transposed else matrix) @ factor
            for matrix, factor in zip(matrices, factors, strict=True)
        ]
        rows.append(torch.cat([product.flatten() for product in products]))
    return torch.stack(rows).view(*vectors.shape[:-1], -1)
