"""What an algorithm can ask of a cluster. A driver answers; an algorithm never knows which one.

``total = yield from SparseSum(sent, worker.weight)`` asks, and the answer has its type.

What is *sent* has the sender's shape: (m,) on a rank, (N, m) in the simulator, where N workers are one
batch. What is *received* is the same for all workers, so it never has the sender's batch dimension.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from regtopk.core.codes import is_lossless
from regtopk.core.senders import OfSenders
from regtopk.core.sparse import SparseGradient

AnswerT = TypeVar("AnswerT")


class AnsweredBy(Generic[AnswerT]):
    """Base of every request: ``yield from`` it hands it to the driver and returns the driver's answer."""

    def __iter__(self) -> Generator[Any, Any, AnswerT]:
        """Ask, and receive the answer."""
        answer: AnswerT = yield self
        return answer


@dataclass(frozen=True)
class SparseSum(AnsweredBy[Tensor]):
    """Receive sum_n w_n x_n, dense (J,), of the workers' sparse vectors x_n."""

    sparse: SparseGradient
    weight: Tensor


@dataclass(frozen=True)
class SenderSum(SparseSum):
    """A `SparseSum` that also tells what each entry is to the workers that sent it.

    Everybody's messages tell that already, so it moves no more bytes than a `SparseSum`. Only where the sum
    is split by region, the owner of a region must say it.
    """

    def __iter__(self) -> Generator[Any, Any, OfSenders]:  # type: ignore[override]
        """Ask, and receive the answer."""
        answer: OfSenders = yield self
        return answer


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

    tensor: Tensor
    weight: Tensor
    code: str = "float32"
    sum_code: str = "float32"
    loss: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that no loss goes unseen."""
        assert is_lossless(self.sum_code) == (self.loss is None), "a lossy sum_code needs a loss buffer"


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

    tensor: Tensor
    weight: Tensor


Request = SparseSum | DenseSum | Gather | Broadcast | Peek
