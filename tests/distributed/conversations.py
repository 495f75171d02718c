"""Algorithms that only tests need: they ask for everything a driver can answer."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.algorithm import Algorithm, Conversation
from regtopk.core.codes import quantise
from regtopk.core.requests import Broadcast, DenseSum, Gather, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.state import ResidualState, State, shared
from regtopk.core.worker import Worker


class WithResidual(Algorithm[ResidualState]):
    """What carries its error, and loses nothing."""

    promises = frozenset({"conserves"})

    def init(self, worker: Worker) -> ResidualState:
        return ResidualState(residual=worker.zeros())


@dataclass(frozen=True, kw_only=True)
class Threshold(WithResidual):
    """Send every entry of at least a threshold: as many as there are, or none.

    A rank has room for its own entries alone, so that ranks differ in it.
    """

    name: ClassVar[str] = "threshold"
    threshold: float

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        kernel = kernels.kernel_for(state.residual, grad)
        taken = kernel.take_above_(state.residual, grad, self.threshold, worker.numel)
        room = int(taken.count.max())
        indices, values = taken.indices[..., :room], taken.values[..., :room]
        sparse = SparseGradient(indices, values, worker.numel, taken.count)
        return (yield from SparseSum(sparse, worker.weight))


@dataclass(frozen=True, kw_only=True)
class ManyRounds(WithResidual):
    """Agree on entries in four rounds, then add them.

    Workers tell their largest entries, some more of them than others (Gather), and how sure they are
    (Gather of int16, a dtype that not every backend knows); one of them, another each step, adds entries of
    its own (Broadcast); what is sent is the union (SparseSum).
    """

    name: ClassVar[str] = "many-rounds"
    k: int

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        state.residual += grad
        largest = state.residual.abs().topk(self.k, dim=-1).indices.sort(dim=-1).values
        count = self.k - (worker.index.expand(*worker.batch_shape, 1).squeeze(-1) + worker.step) % 3
        told = yield from Gather(largest, count, numel=worker.numel)
        sure = yield from Gather(largest.to(torch.int16) % 100, count)
        source = worker.step % worker.num_workers
        hints = yield from Broadcast(largest.flip(-1).to(torch.float64), source)
        more = yield from Broadcast(largest, source, numel=worker.numel)
        is_meant = torch.arange(told.rows.shape[-1]) < told.counts.unsqueeze(-1)
        told_twice = told.rows[is_meant][sure.rows[..., : told.rows.shape[-1]][is_meant] % 2 == 0]
        union = torch.cat([told_twice, hints.long()[: self.k // 2], more[: self.k // 2]]).unique()
        union = union.expand(*worker.batch_shape, len(union))
        values = kernels.take_at_(state.residual, None, union)
        return (yield from SparseSum(SparseGradient(union, values, worker.numel), worker.weight))


@dataclass(frozen=True, kw_only=True)
class CodedSums(WithResidual):
    """Dense, coded on the way to the owner of each region, and coded again on the way back."""

    name: ClassVar[str] = "coded-sums"
    code: str = "4bit"
    sum_code: str = "4bit"

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        sent = quantise(state.residual.add_(grad), self.code)
        state.residual.sub_(sent)
        loss = torch.full_like(sent, torch.nan)  # the driver must write all of it
        aggregate = yield from DenseSum(sent, worker.weight, self.code, self.sum_code, loss)
        state.residual.add_(loss)
        return aggregate


@dataclass
class RunningSumState(State):
    """All aggregates so far."""

    total: Tensor = shared(per_entry=True)


@dataclass(frozen=True, kw_only=True)
class RunningSum(Algorithm[RunningSumState]):
    """Return the sum of all aggregates so far: the very tensor it keeps, which nobody else may write to."""

    name: ClassVar[str] = "running-sum"
    promises = frozenset()

    def init(self, worker: Worker) -> RunningSumState:
        return RunningSumState(worker.weight.new_zeros(worker.numel))

    def exchange(self, grad: Tensor, state: RunningSumState, worker: Worker) -> Conversation:
        everything = torch.arange(worker.numel).expand_as(grad)
        sent = SparseGradient(everything, grad.clone(), worker.numel)
        aggregate = yield from SparseSum(sent, worker.weight)
        if worker.step == 0:
            state.total = aggregate  # received: its own to keep
        else:
            state.total += aggregate
        return state.total
