"""Buffers of a model, such as batch norm's running means: ranks change them apart, a round joins them."""

from typing import Literal

import torch
from torch import Tensor, nn

from regtopk import kernels
from regtopk.core.options import check_choice
from regtopk.core.requests import Broadcast, DenseSum
from regtopk.distributed.requests.broadcast import broadcast
from regtopk.distributed.requests.dense_sum import dense_sum
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.transport.collectives import Collectives

How = Literal["mean", "rank0", "local"]
_CHANGED, _RESHAPED = 1, 2


class ModelBuffers:
    """The buffers of a module, and a copy of them as the round began.

    A buffer that was added or reshaped since the beginning stays what it is on each rank.

    Args:
        module: whose buffers they are; None: nobody's.
        how: "mean" averages floating-point buffers by weight and takes rank 0's of the others, "rank0" takes
            rank 0's of all, "local" leaves each rank its own.
    """

    def __init__(self, module: nn.Module | None, how: How) -> None:
        check_choice("buffers", how, ("mean", "rank0", "local"))
        self.how = how
        self._module = module
        self._shapes = {name: buffer.shape for name, buffer in self.named.items()}
        self._start: dict[str, Tensor] = {}
        self.keep()

    @property
    def are_joined(self) -> bool:
        """Whether the end of a round has anything to do."""
        return bool(self._shapes) and self.how != "local"

    @property
    def named(self) -> dict[str, Tensor]:
        """The buffers by name, as they are now: a module may have put another tensor in the place of one."""
        return {} if self._module is None else dict(self._module.named_buffers())

    def describe(self) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype of each: what ranks compare."""
        return [(name, tuple(buffer.shape), str(buffer.dtype)) for name, buffer in self.named.items()]

    def keep(self) -> None:
        """A round begins."""
        known = {name: buffer for name, buffer in self.named.items() if name in self._shapes}
        self._start = {name: b.clone() for name, b in known.items() if b.shape == self._shapes[name]}

    def take_back(self) -> None:
        """Go back to where the round began."""
        now = self.named
        for name, start in self._start.items():
            if name in now and now[name].shape == start.shape:
                now[name].copy_(start)

    def is_spoiled(self, device: torch.device) -> Tensor:
        """(), whether a number became NaN or inf in this round; masks may hold -inf from the first."""
        spoiled = torch.zeros((), dtype=torch.bool, device=device)
        now = self.named
        for name, start in self._start.items():
            if name in now and now[name].shape == start.shape:
                spoiled |= (start.isfinite() & ~now[name].isfinite()).any().to(device)
        return spoiled

    def saved(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds, of those that `module.state_dict()` has: now, and as the round began."""
        kept = set() if self._module is None else set(self._module.state_dict(keep_vars=True))
        return {
            "now": {name: buffer for name, buffer in self.named.items() if name in kept},
            "start": {name: start for name, start in self._start.items() if name in kept},
        }

    def load(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Go on from a checkpoint."""
        now = self.named
        for name, buffer in saved["now"].items():
            now[name].copy_(buffer)
        self.keep()
        for name, start in saved["start"].items():
            self._start[name].copy_(start)

    def begin_from_rank_0(self, collectives: Collectives, device: torch.device) -> None:
        """Take over rank 0's."""
        for buffer in self.named.values():
            take_over_(buffer, collectives, device)
        self.keep()

    def joined(self, rank: Rank, device: torch.device, now: dict[str, Tensor]) -> dict[str, Tensor]:
        """What all ranks make of the buffers that any rank has changed in this round: for `put`.

        Args:
            rank: this rank.
            device: where collectives run.
            now: this rank's buffers by name.
        """
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

    def put(self, joined: dict[str, Tensor]) -> None:
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
    dtype = torch.float32
    for buffer in buffers:
        dtype = torch.promote_types(dtype, buffer.dtype)
    flat = torch.cat([buffer.flatten().to(device, dtype) for buffer in buffers])
    weight = rank.weights[rank.index].to(flat)
    return kernels.parts_of(dense_sum(rank, DenseSum(flat, weight)), buffers)
