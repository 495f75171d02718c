"""Three byte counts, never mixed.

- `payload_bytes`: the encoded messages one worker contributes, all rounds of a step added. "At equal
  bytes" means the mean of this.
- `sent_bytes`, `received_bytes`: what crosses a worker's interface under the collective used.
- `dense_bytes`: what an uncompressed float32 all_reduce would send from each worker.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Traffic:
    """Byte and entry counts per worker: int64 tensors of shape (N,), or () on a rank."""

    payload_bytes: Tensor
    sent_bytes: Tensor
    received_bytes: Tensor
    dense_bytes: Tensor
    num_entries: Tensor

    @classmethod
    def zeros(cls, *shape: int, device: torch.device | None = None) -> "Traffic":
        """Nothing sent yet."""
        num_counts = len(cls.__dataclass_fields__)
        return cls(*torch.zeros(num_counts, *shape, dtype=torch.int64, device=device).unbind())

    def add_(self, other: "Traffic") -> "Traffic":
        """Add another count to this one."""
        for name in self.__dataclass_fields__:
            getattr(self, name).add_(getattr(other, name))
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """The counts by name."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def all_reduce_bytes(vector_bytes: int, num_workers: int) -> int:
    """What a ring all_reduce of a vector sends from (and brings to) each of N workers."""
    return round(2 * (num_workers - 1) * vector_bytes / num_workers)


def all_gather_bytes(payload_bytes: Tensor) -> tuple[Tensor, Tensor]:
    """What a ring all_gather of messages of the given sizes, (..., N), sends and brings per worker.

    A worker forwards every message except the one that its successor contributed, and receives every
    message except its own: N - 1 messages each way.
    """
    total = payload_bytes.sum(-1, keepdim=True)
    return total - payload_bytes.roll(-1, dims=-1), total - payload_bytes
