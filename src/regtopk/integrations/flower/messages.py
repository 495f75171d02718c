"""What server and clients tell each other in a round, and how a model becomes a flat vector."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from regtopk.core.worker import Layout
from regtopk.errors import StateError
from regtopk.wire import decode

Model = dict[str, Tensor]


def layout_of(model: Mapping[str, Tensor], whole: Collection[str]) -> Layout:
    """Where the arrays lie in the flat vector that is exchanged sparsely; some travel whole instead."""
    return Layout.of_shapes((name, tuple(x.shape), "other") for name, x in model.items() if name not in whole)


def to_flat(model: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """The flat vector of a model, (J,) float32, of its own memory; refuses arrays of another layout."""
    for layer in layout.layers:
        array = model.get(layer.name)
        found = None if array is None else (tuple(array.shape), array.dtype)
        if found != (layer.shape, torch.float32):
            raise StateError(f"array {layer.name!r} must be float32 of shape {layer.shape}, got {found}")
    return torch.cat([model[layer.name].reshape(-1) for layer in layout.layers])


def from_flat(flat: Tensor, layout: Layout, whole: Mapping[str, Tensor], names: Sequence[str]) -> Model:
    """The model with its arrays in the given order; the inverse of `to_flat`."""
    model = dict(whole)
    for layer in layout.layers:
        model[layer.name] = flat[layer.start : layer.start + layer.numel].view(layer.shape)
    return {name: model[name] for name in names}


def spoiled_names(start: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> list[str]:
    """The arrays in which a number became NaN or inf; masks may hold -inf from the first."""
    return [name for name, array in now.items() if bool((start[name].isfinite() & ~array.isfinite()).any())]


def checksum(flat: Tensor) -> int:
    """Of the bytes of a vector: two that have the same are taken to be the same."""
    return crc32(flat.numpy().tobytes())


@dataclass(frozen=True)
class Reply:
    """What a client answers in a round."""

    client: str  # its name, which stays when its process is started anew
    round: int  # in which it was asked
    frame: Tensor  # what it sends of its update, as `wire.encode` makes it
    whole: Model = field(default_factory=dict)  # the arrays that travel whole, after training

    @property
    def token(self) -> str:
        """Names the reply in what the server acknowledges: another round or frame has another one."""
        return f"{self.round}-{hashlib.sha256(self.frame.numpy().tobytes()).hexdigest()[:16]}"


class Accepted(NamedTuple):
    """The last reply of a client that became part of the model: its token, and the share w_n it had."""

    token: str
    share: float


@dataclass(frozen=True)
class PastRound:
    """What a round changed: accepted frames, in the order they are summed in, and their shares w_n."""

    frames: tuple[Tensor, ...]
    shares: tuple[float, ...]

    @property
    def num_bytes(self) -> int:
        """What it takes to tell it; 8 bytes for a share and 8 for a length."""
        return sum(len(frame) + 16 for frame in self.frames)

    def aggregate(self, numel: int) -> Tensor:
        """sum_n w_n x_n, (J,): float32 products and additions in a fixed order, the same bits everywhere."""
        total = torch.zeros(numel)
        for frame, share in zip(self.frames, self.shares, strict=True):
            sparse = decode(frame, numel)
            total.index_add_(0, sparse.indices, share * sparse.values)
        return total


@dataclass(frozen=True)
class Instruction:
    """What the server tells a client when it asks it to train."""

    server: str  # its name, which no other has
    round: int  # from 1
    checksum: int  # of this round's flat vector
    accepted: dict[str, Accepted]  # what became of clients' last replies, by client
    whole: list[str]  # the names of the arrays that travel whole
    arrays: Model  # these, and all others unless the client can make them from what it missed
    missed: list[PastRound] | None  # from the round that it last took part in to this one; None: all arrays
