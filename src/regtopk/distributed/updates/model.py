"""A rank's model between two exchanges of updates: where the round began, and what was learned since."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from regtopk import kernels
from regtopk.distributed.state.buckets import Bucket, flat_dtype
from regtopk.distributed.state.parameters import NamedParameters, Parameters, facts, named_pairs, refuse_meta
from regtopk.distributed.state.saved_shards import Piece, Sharding
from regtopk.distributed.state.shards import ShardedParameters, is_sharded, local, plain
from regtopk.distributed.transport.collectives import Collectives
from regtopk.distributed.updates import optimizers
from regtopk.distributed.updates.buffers import How, ModelBuffers, take_over_
from regtopk.distributed.updates.inner import Inner, InnerOptimizers
from regtopk.distributed.updates.notices import Notices
from regtopk.rounds import cut_evenly

Anchors = Literal["device", "cpu"]


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
        self._module = source if isinstance(source, nn.Module) else None
        self.is_sharded = is_sharded(source)
        self.parameters = ShardedParameters(source) if self.is_sharded else Parameters(source)
        self.inner = InnerOptimizers(optimizer, self.parameters.whole, grad_scaler)
        named = self.parameters.named
        sizes = {name: p.numel() for name, p in named.items() if p.numel() > 0}
        parts = cut_evenly(list(sizes.values()), fragments)
        self.fragments = [tuple(sizes)[part.start : part.stop] for part in parts]
        self.frozen = {name: p for name, p in named_pairs(source) if name not in named}
        self.buffers = ModelBuffers(self._module, buffers)
        refuse_meta(self.frozen.items())
        refuse_meta(self.buffers.named.items(), "buffer")
        self._flat = torch.cat([p.detach().flatten().to(flat_dtype(named.values())) for p in named.values()])
        self.start = {name: nn.Parameter(part) for name, part in self._parts(self._flat, named).items()}
        self._kept: Tensor | None = None  # theta_start in the CPU's memory, if it is to be there
        if anchors == "cpu":
            self._kept = torch.empty_like(self._flat, device="cpu", pin_memory=self._flat.is_cuda)
            self._put_start(self._kept.copy_(self._flat))
        self._vectors: dict[tuple[str, ...], Tensor] = {}  # the update, by what each bucket holds
        self.update: dict[str, Tensor] = {}
        self.outer = optimizers.make_outer(outer, list(self.start.values()))

    def describe(self) -> dict[str, Any]:
        """What all ranks must have the same."""
        names = optimizers.names_in(self.inner.param_groups, self.parameters.whole)
        return {
            "optimizer": (self.inner.kinds, names),
            "outer": optimizers.describe_outer(self.outer),
            "buffers": self.buffers.how,
            "buffers of the model": facts(self.buffers.named),
            "frozen parameters": facts(self.frozen),
        }

    def sharding(self) -> Sharding:
        """How the state of an exchange belongs to the sharded parameters: each is a piece by itself."""
        wholes = self.parameters.whole
        inner = optimizers.names_in(self.inner.param_groups, wholes)
        outer = [] if self.outer is None else optimizers.names_in(self.outer.param_groups, self.start)
        pieces = [Piece(name, name, 0) for name in wholes]
        return Sharding(dict(wholes), pieces, tuple(chain(*inner)), tuple(chain(*outer)))

    def begin(self, collectives: Collectives, buckets: list[Bucket], notices: Notices) -> None:
        """Start from rank 0's model, and make room for the update: a vector for each bucket."""
        collectives.broadcast(self._flat.view(torch.uint8), 0)
        for tensor in (*self.frozen.values(), *self.buffers.named.values()):
            take_over_(local(tensor), collectives, self.parameters.device)
        self.buffers.keep()
        self.write_back()
        if isinstance(self.parameters, ShardedParameters):
            self.parameters.end_means()
        modules = [] if self._module is None else list(self._module.modules())
        self.notices = notices
        self.hooks: list[Any] = [part.register_state_dict_pre_hook(notices.hear_read) for part in modules]
        self.hooks += [part.register_load_state_dict_post_hook(notices.hear_load) for part in modules]
        for bucket in buckets:
            vector = torch.zeros(bucket.layout.numel, dtype=self._flat.dtype, device=self.parameters.device)
            self._vectors[bucket.names] = vector
            self.update |= self._parts(vector, bucket.names)

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
        for name, part in self._parts(flat, self.start).items():
            self.start[name].data = part

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

    def _parts(self, flat: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """A vector as parameters in this order (views)."""
        shapes = {name: self.parameters.shapes[name] for name in names}
        parts = flat.split([math.prod(shape) for shape in shapes.values()])
        return {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
