"""What an algorithm can ask of a cluster. A driver answers; an algorithm never knows which one.

``total = yield from SparseSum(sent, worker.weight)`` asks, and the answer has its type.

What is *sent* has the sender's shape: (m,) on a rank, (N, m) in the simulator, where N workers are one
batch. What is *received* is the same for all workers, so it never has the sender's batch dimension.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from regtopk import kernels
from regtopk.core.codes import is_lossless
from regtopk.core.sparse import SparseGradient, clear_at_, read_at, take

AnswerT = TypeVar("AnswerT")


class AnsweredBy(Generic[AnswerT]):
    """Base of every request: ``yield from`` it hands it to the driver and returns the driver's answer."""

    num_rounds: ClassVar[int] = 1  # of messages, between asking and being answered

    def __iter__(self) -> Generator[Any, Any, AnswerT]:
        answer: AnswerT = yield self
        return answer


@dataclass(frozen=True)
class SparseSum(AnsweredBy[Tensor]):
    """Receive sum_n w_n x_n, dense (J,), of the workers' sparse vectors x_n."""

    sparse: SparseGradient
    weight: Tensor


@dataclass(frozen=True)
class OfSenders:
    """The answer to `SenderSum`: the sum, and what each entry is to those who sent it.

    Entries may be named twice, with the same mean, and entries that nobody sent may be among them: their mean
    here is zero. So what is done with the means is written to an entry, not added to it.

    Args:
        total: (J,), S = sum_n w_n x_n.
        indices: (u,) int64, all entries that some worker sent.
        mean: (u,), m = S / W there, W being the summed weights of the workers that sent the entry.
        missing: (u,), the summed weights of those that did not; exactly zero if all did.
    """

    total: Tensor
    indices: Tensor
    mean: Tensor
    missing: Tensor

    @classmethod
    def of(cls, total: Tensor, sent_weight: Tensor, indices: Tensor, weights: Tensor) -> "OfSenders":
        """From dense sums S and W, (..., J), where to look, (..., u), and all the weights, (N,)."""
        if indices.shape[-1] >= total.shape[-1]:  # looking everywhere is then no more work
            indices = torch.arange(total.shape[-1], device=total.device).expand(total.shape)
        weight = take(sent_weight, indices)
        mean = (take(total, indices) / weight).where(weight > 0, 0.0)
        # Added in the same order as W: the difference is zero to the bit where all workers sent.
        everyone = kernels.sum_dense_in_rank_order(torch.ones_like(weights).unsqueeze(-1), weights)
        return cls(total, indices, mean, everyone - weight)


@dataclass(frozen=True)
class SenderSum(SparseSum):
    """A `SparseSum` that also tells what each entry is to the workers that sent it.

    Everybody's messages tell that already, so it moves no more bytes than a `SparseSum`. Only where the sum
    is split by region, the owner of a region must say it.
    """

    def __iter__(self) -> Generator[Any, Any, OfSenders]:  # type: ignore[override]
        answer: OfSenders = yield self
        return answer


def mean_of_senders(summed: OfSenders) -> Tensor:
    """m, dense (J,): the weighted mean over the workers that sent an entry, zero where nobody did."""
    return torch.zeros_like(summed.total).scatter_(-1, summed.indices, summed.mean)


def impute_(residual: Tensor, sent: SparseGradient, summed: OfSenders, rho: float | Tensor) -> Tensor:
    """The aggregate S + rho (1 - W) m; who did not send an entry takes rho m out of its residual.

    sum_n w_n e_n falls by what the aggregate grows: a worker pays the very number that the aggregate gets,
    times its weight. Work and memory are O(N k) per worker. The total of ``summed`` becomes the aggregate.
    """
    pays = rho * summed.mean
    kept = read_at(residual, sent)
    at = summed.indices.expand(*residual.shape[:-1], summed.indices.shape[-1])
    residual.scatter_(-1, at, take(residual, summed.indices) - pays)
    # Senders pay nothing: they keep what they had, to the bit.
    if sent.count is None:
        residual.scatter_(-1, sent.indices, kept)
    else:
        clear_at_(residual, sent)
        residual.scatter_add_(-1, sent.without_padding()[0], kept)
    grown = take(summed.total, summed.indices) + summed.missing * pays
    # It is written where it was summed: what was known of where the total is not zero stays true.
    with _unsafe_preserve_version_counter(summed.total):
        return summed.total.scatter_(-1, summed.indices, grown)


@dataclass(frozen=True)
class DenseSum(AnsweredBy[Tensor]):
    """Receive sum_n w_n x_n, (m,), of the workers' vectors x_n of equal length.

    Each region of the vector is summed by one worker, its owner. With a lossy ``sum_code`` the owner codes
    the sums before all receive them. What the code loses is written to ``loss``: in its own region the owner
    finds there what it must add to its residual (the loss over its weight). All other entries are zero.

    Args:
        tensor: x_n, already rounded to what ``code`` can represent.
        weight: w_n.
        code: the value code of what travels to a region's owner.
        sum_code: the value code of the sums that travel from there to all.
        loss: a buffer like ``tensor``; given if and only if ``sum_code`` is lossy.
    """

    num_rounds = 2
    tensor: Tensor
    weight: Tensor
    code: str = "float32"
    sum_code: str = "float32"
    loss: Tensor | None = None

    def __post_init__(self) -> None:
        assert is_lossless(self.sum_code) == (self.loss is None), "a lossy sum_code needs a loss buffer"


@dataclass(frozen=True)
class ToOwners(AnsweredBy[Tensor]):
    """Receive sum_n w_n x_n on the entries that this worker owns (`core.owners`): (L,), dense.

    This alone differs between the workers: a simulator answers (N, L). Workers of weight zero get zeros.

    Args:
        sparse: x_n as a message for each owner, (..., A, m).
        weight: w_n.
    """

    sparse: SparseGradient
    weight: Tensor


@dataclass(frozen=True)
class FromOwners(AnsweredBy[Tensor]):
    """Receive what all owners send of their entries, sparse vectors of L entries, as one of J, dense."""

    sparse: SparseGradient
    numel: int


@dataclass(frozen=True)
class Gathered:
    """The answer to `Gather`: rows (N, m); the first counts[n] entries of row n are valid."""

    rows: Tensor
    counts: Tensor

    def joined(self, senders: list[int]) -> Tensor:
        """The rows of some workers, one after the other: (m',), the shape of everything received."""
        joined = torch.cat([self.rows[..., n, :] for n in senders], dim=-1)  # a list as index waits for a GPU
        return joined if joined.dim() == 1 else joined.unsqueeze(-2)


@dataclass(frozen=True)
class Gather(AnsweredBy[Gathered]):
    """Receive every worker's vector, (N, m), in rank order.

    Args:
        tensor: this worker's vector.
        count: how many entries of it are valid, counted from the first; None: all of them.
        numel: given if the vector is a set of entries of a vector of this length, ascending int64. The set
            then travels in the cluster's index code; otherwise the vector travels as it is.
    """

    tensor: Tensor
    count: Tensor | None = None
    numel: int | None = None


@dataclass(frozen=True)
class Broadcast(AnsweredBy[Tensor]):
    """Receive the vector of worker `source`, (m,); `numel` as in `Gather`."""

    tensor: Tensor
    source: int
    numel: int | None = None


@dataclass(frozen=True)
class Peek(AnsweredBy[Tensor]):
    """Receive the true sum_n w_n x_n, (J,), at no cost. Only a simulator can answer that."""

    num_rounds = 0
    tensor: Tensor
    weight: Tensor


Request = SparseSum | DenseSum | ToOwners | FromOwners | Gather | Broadcast | Peek
