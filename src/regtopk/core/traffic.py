"""Three byte counts, never mixed.

- `payload_bytes`: the encoded messages one worker contributes, all rounds of a step added. "At equal
  bytes" means the mean of this.
- `sent_bytes`, `received_bytes`: what crosses a worker's interface under the collective used.
- `dense_bytes`: what an uncompressed float32 all_reduce would send from each worker.
"""

import torch
from torch import Tensor

NAMES = ("payload_bytes", "sent_bytes", "received_bytes", "num_entries", "dense_bytes")


class Traffic:
    """Byte and entry counts of N workers: each of the names is an int64 tensor of shape (..., N).

    Args:
        counts: (..., N, 5), all of them in one tensor, so that a step is added in one operation.
    """

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    @classmethod
    def zeros(cls, *shape: int, device: torch.device | None = None) -> "Traffic":
        """Nothing sent yet."""
        return cls(torch.zeros(*shape, len(NAMES), dtype=torch.int64, device=device))

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Tensor]) -> "Traffic":
        """The counts that `state_dict` names, copied."""
        return cls(torch.stack([state_dict[name] for name in NAMES], dim=-1))

    def state_dict(self) -> dict[str, Tensor]:
        """The counts by name."""
        return dict(zip(NAMES, self.counts.unbind(-1), strict=True))

    def add_(self, other: "Traffic") -> "Traffic":
        """Add another count to this one."""
        self.counts.add_(other.counts)
        return self

    @property
    def payload_bytes(self) -> Tensor:
        """What each worker contributes."""
        return self.counts[..., 0]

    @property
    def sent_bytes(self) -> Tensor:
        """What each worker's interface sends."""
        return self.counts[..., 1]

    @property
    def received_bytes(self) -> Tensor:
        """What each worker's interface receives."""
        return self.counts[..., 2]

    @property
    def num_entries(self) -> Tensor:
        """How many entries each worker sends."""
        return self.counts[..., 3]

    @property
    def dense_bytes(self) -> Tensor:
        """What a dense exchange would send."""
        return self.counts[..., 4]


def all_reduce_bytes(vector_bytes: int, num_workers: int) -> int:
    """What a ring all_reduce of a vector sends from (and brings to) each of N workers."""
    return round(2 * (num_workers - 1) * vector_bytes / num_workers)


def as_counts(payload: Tensor, sent: Tensor, received: Tensor, entries: Tensor) -> Tensor:
    """What a request adds to a `Traffic`: (..., N) each, (..., N, 5) together."""
    return torch.stack([payload, sent, received, entries, torch.zeros_like(payload)], dim=-1)


def all_gather_bytes(payload_bytes: Tensor) -> tuple[Tensor, Tensor]:
    """What a ring all_gather of messages of the given sizes, (..., N), sends and brings per worker.

    A worker forwards every message except the one that its successor contributed, and receives every
    message except its own: N - 1 messages each way.
    """
    total = payload_bytes.sum(-1, keepdim=True)
    return total - payload_bytes.roll(-1, dims=-1), total - payload_bytes
