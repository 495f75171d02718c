"""What an algorithm can ask of a cluster. A driver answers; an algorithm never knows which one.

What is *sent* has the sender's shape: (m,) on a rank, (N, m) in the simulator, where N workers are one
batch. What is *received* is the same for all, so it never has the sender's batch dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.core.codes import is_lossless
from regtopk.core.sparse import SparseGradient


@dataclass(frozen=True)
class SparseSum:
    """Receive sum_n w_n x_n, dense (J,), of the workers' sparse vectors x_n."""

    sparse: SparseGradient
    weight: Tensor


@dataclass(frozen=True)
class DenseSum:
    """Receive sum_n w_n x_n, (m,), of the workers' vectors x_n of equal length.

    Each region of the vector is summed by one worker. With a lossy ``sum_code`` the sums are coded before
    all receive them, and what that lost is written to ``loss``: the region's owner finds there what it must
    add to its residual (the loss over its weight), everybody else zero.

    Args:
        tensor: x_n, on the grid of ``code``.
        weight: w_n.
        code: how the values travel to the region's owner.
        sum_code: how the sums travel from there to all.
        loss: a buffer like ``tensor``, needed if and only if ``sum_code`` is lossy.
    """

    tensor: Tensor
    weight: Tensor
    code: str = "float32"
    sum_code: str = "float32"
    loss: Tensor | None = None

    def __post_init__(self) -> None:
        """Nothing may get lost unseen."""
        assert is_lossless(self.sum_code) == (self.loss is None), "a lossy sum_code needs a loss buffer"


@dataclass(frozen=True)
class Gather:
    """Receive every worker's vector, (N, m), in rank order, as `Gathered`.

    Args:
        tensor: this worker's.
        count: how many of its entries are meant; None: all.
        numel: says that it is a set of entries of a vector of this length, ascending int64, which then
            travels in the index code; None: it travels as it is.
    """

    tensor: Tensor
    count: Tensor | None = None
    numel: int | None = None


@dataclass(frozen=True)
class Gathered:
    """The answer to `Gather`: rows (N, m), of which the first counts[n] entries are meant."""

    rows: Tensor
    counts: Tensor

    def joined(self, senders: list[int]) -> Tensor:
        """The rows of some workers one after the other, in the shape of what is received."""
        joined = torch.cat([self.rows[..., n, :] for n in senders], dim=-1)  # a list as index waits for a GPU
        return joined if joined.dim() == 1 else joined.unsqueeze(-2)


@dataclass(frozen=True)
class Broadcast:
    """Receive the vector of worker `source`, (m,); `numel` as in `Gather`."""

    tensor: Tensor
    source: int
    numel: int | None = None


@dataclass(frozen=True)
class Peek:
    """Receive the true sum_n w_n x_n, (J,), at no cost. Only a simulator can answer that."""

    tensor: Tensor
    weight: Tensor


Request = SparseSum | DenseSum | Gather | Broadcast | Peek
