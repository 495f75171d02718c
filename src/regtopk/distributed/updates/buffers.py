"""Buffers of a model, such as batch norm's running means: ranks change them apart, a round joins them."""

from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn

from regtopk import kernels
from regtopk.core.requests import Broadcast, DenseSum
from regtopk.distributed.requests.gather import broadcast
from regtopk.distributed.requests.owner_sums import dense_sum
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.transport.collectives import Collectives
from regtopk.distributed.updates.notices import Notices

How = Literal["mean", "rank0", "local"]
Buffers = dict[str, Tensor]
_CHANGED, _RESHAPED = 1, 2


class ModelBuffers:
    """The buffers of a module (None: there are none), and a copy of them as the round began.

    One that was added or reshaped since the beginning stays what it is on each rank. How the others are
    joined: see `UpdateExchange`.
    """

    def __init__(self, module: nn.Module | None, how: How) -> None:
        self.how = how
        self._module = module
        self._shapes = {name: buffer.shape for name, buffer in self.named.items()}
        self.are_joined = bool(self._shapes) and how != "local"  # whether the end of a round joins them
        self.keep()

    @property
    def named(self) -> Buffers:
        """The buffers by name, as they are now: a module may have put another tensor in the place of one."""
        return {} if self._module is None else dict(self._module.named_buffers())

    def keep(self) -> None:
        """A round begins."""
        now = self.named.items()
        self._start = {name: buffer.clone() for name, buffer in now if buffer.shape == self._shapes.get(name)}

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Buffers as they are now and as the round began."""
        now = self.named
        pairs = [(now[name], start) for name, start in self._start.items() if name in now]
        return [(buffer, start) for buffer, start in pairs if buffer.shape == start.shape]

    def take_back(self) -> None:
        """Go back to where the round began."""
        for buffer, start in self._pairs():
            buffer.copy_(start)

    def is_spoiled(self, device: torch.device) -> Tensor:
        """(), whether a number became NaN or inf in this round; masks may hold -inf from the first."""
        spoiled = torch.zeros((), dtype=torch.bool, device=device)
        for buffer, start in self._pairs():
            spoiled |= (start.isfinite() & ~buffer.isfinite()).any().to(device)
        return spoiled

    def saved(self) -> dict[str, Buffers]:
        """What a checkpoint holds, of those that `module.state_dict()` has: now, and as the round began."""
        with Notices.silent():
            kept = set() if self._module is None else set(self._module.state_dict(keep_vars=True))
        return {
            "now": {name: buffer for name, buffer in self.named.items() if name in kept},
            "start": {name: start for name, start in self._start.items() if name in kept},
        }

    def load(self, saved: dict[str, Buffers]) -> None:
        """Go on from a checkpoint."""
        self.put(saved["now"])
        for name, start in saved["start"].items():
            self._start[name].copy_(start)

    def joined(self, rank: Rank, device: torch.device, now: Buffers) -> Buffers:
        """What all ranks make of the buffers, this rank's `now`, that any has changed in this round."""
        if not self.are_joined:
            return {}
        changes = [_change(now.get(name), self._start.get(name)).to(device) for name in self._shapes]
        with rank.timer.phase("collective_s"):
            agreed = rank.collectives.maximum(torch.stack(changes)).tolist()
        changed = [name for name, change in zip(self._shapes, agreed, strict=True) if change == _CHANGED]
        averaged = [name for name in changed if now[name].is_floating_point() and self.how == "mean"]
        found = {
            name: broadcast(rank, Broadcast(now[name].to(device).flatten(), 0)).view_as(now[name])
            for name in changed
            if name not in averaged
        }
        means = _mean([now[name] for name in averaged], rank, device) if averaged else []
        return found | dict(zip(averaged, means, strict=True))

    def put(self, joined: Buffers) -> None:
        """End a round: take over what was joined."""
        now = self.named
        for name, value in joined.items():
            if now[name].shape == value.shape:
                now[name].copy_(value)
        self.keep()


def take_over_(tensor: Tensor, collectives: Collectives, device: torch.device) -> None:
    """Write rank 0's tensor over this rank's, whatever its dtype."""
    message = tensor.detach().to(device, copy=True).flatten().view(torch.uint8)
    collectives.broadcast(message, 0)
    tensor.copy_(message.view(tensor.dtype).view(tensor.shape))


def _change(now: Tensor | None, start: Tensor | None) -> Tensor:
    if now is None or start is None or now.shape != start.shape or now.dtype != start.dtype:
        return torch.tensor(_RESHAPED)
    return (now != start).any().long()


def _mean(buffers: list[Tensor], rank: Rank, device: torch.device) -> list[Tensor]:
    dtype = reduce(torch.promote_types, (buffer.dtype for buffer in buffers), torch.float32)
    flat = torch.cat([buffer.flatten().to(device, dtype) for buffer in buffers])
    weight = rank.weights[rank.index].to(flat)
    return kernels.parts_of(dense_sum(rank, DenseSum(flat, weight)), buffers)
