"""A rank's model between two exchanges of updates: where the round began, and what was learned since."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regtopk import kernels
from regtopk.core.requests import Broadcast, DenseSum
from regtopk.distributed.requests.gather import broadcast
from regtopk.distributed.requests.owner_sums import dense_sum
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.state.buckets import Bucket, flat_dtype
from regtopk.distributed.state.parameters import NamedParameters, Parameters, facts, named_pairs, refuse_meta
from regtopk.distributed.state.saved_shards import Piece, Sharding
from regtopk.distributed.state.shards import ShardedParameters, is_sharded, local, plain
from regtopk.distributed.steps.attached import Notices
from regtopk.distributed.transport.collectives import Collectives
from regtopk.distributed.updates import optimizers
from regtopk.distributed.updates.inner import Inner, InnerOptimizers
from regtopk.rounds import cut_evenly

Anchors = Literal["device", "cpu"]
How = Literal["mean", "rank0", "local"]
Buffers = dict[str, Tensor]
_CHANGED, _RESHAPED = 1, 2


class LocalModel:
    """Parameters and buffers that the optimizers of this rank change, from one round to the next.

    Beside the model there are two vectors of its size, in at least float32: theta_start, and the update. Of a
    sharded model a rank holds a part, and so of these. The arguments are those of `UpdateExchange`.
    `fragments` are the names of each part's parameters, but for those without entries. `update` has the
    update, or its aggregate, by name.
    """

    def __init__(
        self,
        source: nn.Module | NamedParameters,
        optimizer: Inner,
        fragments: int = 1,
        grad_scaler: torch.amp.GradScaler | None = None,
        *,
        outer: optimizers.Outer | None = None,
        buffers: How = "mean",
        anchors: Anchors = "device",
    ) -> None:
        source = plain(source)
        self.is_sharded = is_sharded(source)
        self.parameters = ShardedParameters(source) if self.is_sharded else Parameters(source)
        self.inner = InnerOptimizers(optimizer, self.parameters.whole, grad_scaler)
        named = self.parameters.named
        sizes = {name: p.numel() for name, p in named.items() if p.numel() > 0}
        parts = cut_evenly(list(sizes.values()), fragments)
        self.fragments = [tuple(sizes)[part.start : part.stop] for part in parts]
        self.frozen = {name: p for name, p in named_pairs(source) if name not in named}
        self.buffers = ModelBuffers(self.parameters.module, buffers)
        refuse_meta(self.frozen.items())
        refuse_meta(self.buffers.named.items(), "buffer")
        self._flat = torch.cat([p.detach().flatten().to(flat_dtype(named.values())) for p in named.values()])
        starts = map(nn.Parameter, kernels.parts_of(self._flat, list(named.values())))
        self.start = dict(zip(named, starts, strict=True))
        self._kept: Tensor | None = None  # theta_start in the CPU's memory, if it is to be there
        if anchors == "cpu":
            self._kept = torch.empty_like(self._flat, device="cpu", pin_memory=self._flat.is_cuda)
            self._put_start(self._kept.copy_(self._flat))
        self._vectors: dict[tuple[str, ...], Tensor] = {}  # the update, by what each bucket holds
        self.update: dict[str, Tensor] = {}
        self.outer = optimizers.make_outer(outer, list(self.start.values()))

    @property
    def inner_names(self) -> list[list[str | None]]:
        """The parameters of each group: two optimizers of one class may be given in another order."""
        return optimizers.names_in(self.inner.param_groups, self.parameters.whole)

    def describe(self) -> dict[str, Any]:
        """What all ranks must have the same."""
        return {
            "optimizer": (self.inner.kinds, self.inner_names),
            "outer": optimizers.describe_outer(self.outer),
            "buffers": self.buffers.how,
            "buffers of the model": facts(self.buffers.named),
            "frozen parameters": facts(self.frozen),
        }

    def sharding(self) -> Sharding:
        """How the state of an exchange belongs to the sharded parameters: each is a piece by itself."""
        wholes = self.parameters.whole
        outer = [] if self.outer is None else optimizers.names_in(self.outer.param_groups, self.start)
        pieces = [Piece(name, name, 0) for name in wholes]
        return Sharding(dict(wholes), pieces, tuple(chain(*self.inner_names)), tuple(chain(*outer)))

    def begin(self, collectives: Collectives, buckets: list[Bucket], notices: Notices) -> None:
        """Start from rank 0's model, and make room for the update: a vector for each bucket."""
        collectives.broadcast(self._flat.view(torch.uint8), 0)
        for tensor in (*self.frozen.values(), *self.buffers.named.values()):
            part = local(tensor)
            message = part.detach().to(self.parameters.device, copy=True).flatten().view(torch.uint8)
            collectives.broadcast(message, 0)
            part.copy_(message.view(part.dtype).view(part.shape))
        self.buffers.keep()
        self.write_back()
        if isinstance(self.parameters, ShardedParameters):
            self.parameters.end_means()
        self.notices, modules = notices, list(self.parameters.module.modules())
        self.hooks: list[Any] = [part.register_state_dict_pre_hook(notices.hear_read) for part in modules]
        self.hooks += [part.register_load_state_dict_post_hook(notices.hear_load) for part in modules]
        for bucket in buckets:
            vector = torch.zeros(bucket.layout.numel, dtype=self._flat.dtype, device=self.parameters.device)
            self._vectors[bucket.names] = vector
            parts = kernels.parts_of(vector, self.starts(bucket.names))
            self.update |= zip(bucket.names, parts, strict=True)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        """Have theta_start on the device meanwhile, if it is kept in the CPU's memory."""
        if self._kept is None:
            yield
            return
        self._put_start(self._kept.to(self.parameters.device, copy=True))
        try:
            yield
        finally:
            self._put_start(self._kept.copy_(self._flat))

    def _put_start(self, flat: Tensor) -> None:
        """Give theta_start other memory; its parameters, which the outer optimizer holds, stay the same."""
        self._flat = flat
        starts = list(self.start.values())
        for start, part in zip(starts, kernels.parts_of(flat, starts), strict=True):
            start.data = part

    def take_update(self, buckets: list[Bucket]) -> tuple[list[Tensor], Tensor]:
        """theta_start - theta_n as the buckets' vectors, and whether this and all buffers are finite, ().

        Parameters of a lower precision began this round rounded, and the rounding is no update.
        """
        self.parameters.check()
        self.parameters.check_trainable()
        named = self.parameters.named
        vectors = [self._vectors[bucket.names] for bucket in buckets]
        are_finite = [
            kernels.join_(vector, [named[name] for name in bucket.names], self.starts(bucket.names))
            for vector, bucket in zip(vectors, buckets, strict=True)
        ]
        is_spoiled = self.buffers.is_spoiled(self.parameters.device)
        return vectors, torch.stack([*are_finite, ~is_spoiled]).all()

    def apply(self, outer: Optimizer | None, names: Sequence[str]) -> None:
        """Let the outer optimizer change theta_start of some parameters, whose aggregate is in `update`."""
        starts, updates = self.starts(names), [self.update[name] for name in names]
        if outer is None:
            torch._foreach_sub_(starts, updates)
            return
        for start, update in zip(starts, updates, strict=True):
            start.grad = update
        outer.step()
        for start in starts:
            start.grad = None

    def outer_as_it_is(self) -> Optimizer | None:
        """The outer optimizer with the options it has now, which users may change; the state is shared."""
        if self.outer is None:
            return None
        frozen: Optimizer = object.__new__(type(self.outer))
        frozen.__dict__.update(self.outer.__dict__)
        frozen.__dict__.pop("step", None)  # that a scheduler has put around the original's
        frozen.param_groups = [dict(group) for group in self.outer.param_groups]
        return frozen

    def starts(self, names: Sequence[str]) -> list[Tensor]:
        """theta_start of some parameters."""
        return [self.start[name] for name in names]

    def own(self, names: Iterable[str]) -> list[Tensor]:
        """Some parameters of the model, to be written to."""
        if isinstance(self.parameters, ShardedParameters):
            self.parameters.reshard()
        named = self.parameters.named
        return [named[name] for name in names]

    def write_back(self) -> None:
        """Give the model theta_start."""
        torch._foreach_copy_(self.own(self.start), list(self.start.values()))


class ModelBuffers:
    """The buffers of a module, such as running means, and a copy of them as the round began.

    One that was added or reshaped since the beginning stays what it is on each rank. How the others are
    joined: see `UpdateExchange`.
    """

    def __init__(self, module: nn.Module, how: How) -> None:
        self.how = how
        self._module = module
        self._shapes = {name: buffer.shape for name, buffer in self.named.items()}
        self.are_joined = bool(self._shapes) and how != "local"  # whether the end of a round joins them
        self.keep()

    @property
    def named(self) -> Buffers:
        """The buffers by name, as they are now: a module may have put another tensor in the place of one."""
        return dict(self._module.named_buffers())

    def keep(self) -> None:
        """A round begins."""
        now = self.named.items() if self._shapes else ()  # to look up all names takes a millisecond
        self._start = {name: buffer.clone() for name, buffer in now if buffer.shape == self._shapes.get(name)}

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        now = self.named if self._start else {}
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
            kept = set(self._module.state_dict(keep_vars=True))
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
        now = self.named if joined else {}
        for name, value in joined.items():
            if now[name].shape == value.shape:
                now[name].copy_(value)
        self.keep()


def _change(now: Tensor | None, start: Tensor | None) -> Tensor:
    if now is None or start is None or now.shape != start.shape or now.dtype != start.dtype:
        return torch.tensor(_RESHAPED)
    return (now != start).any().long()


def _mean(buffers: list[Tensor], rank: Rank, device: torch.device) -> list[Tensor]:
    dtype = reduce(torch.promote_types, (buffer.dtype for buffer in buffers), torch.float32)
    flat = torch.cat([buffer.flatten().to(device, dtype) for buffer in buffers])
    weight = rank.weights[rank.index].to(flat)
    return kernels.parts_of(dense_sum(rank, DenseSum(flat, weight)), buffers)
