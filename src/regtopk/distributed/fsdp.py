"""For users of fully_shard (FSDP2): a hook that exchanges over the replicas of a sharded model.

FSDP reduces the gradients of a unit to this rank's part of them: one flat vector, the parts of all the unit's
parameters one after another, each padded to the size of the largest part. The hook takes it away, and leaves
zeros. When backward is over, all units are exchanged with the ranks that hold the same parts: selected
within, one by one, and sent together. So the host waits once for all of them, and never inside of backward.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regtopk import kernels
from regtopk.core.algorithm import Algorithm
from regtopk.distributed.base import ExchangeBase
from regtopk.distributed.collectives import Collectives
from regtopk.distributed.kind import Kind
from regtopk.distributed.layout import flat_dtype
from regtopk.distributed.options import Options
from regtopk.distributed.parameters import Parameters, is_fsdp2
from regtopk.distributed.sharded import Shards, check_placements, group_of, groups_of, local
from regtopk.distributed.sharded_checkpoint import Piece, Sharding
from regtopk.distributed.step import Steps
from regtopk.errors import ClusterError

_log = logging.getLogger("regtopk")


class Unit(NamedTuple):
    """A module that fully_shard was called on, or several that were sharded together."""

    name: str
    module: Any  # an FSDPModule
    group: Any  # torch's FSDPParamGroup: the parameters that are communicated together

    @property
    def trainable(self) -> list[Any]:
        """Its sharded parameters that require a gradient, in the order of the flat vector."""
        sharded = [p.sharded_param for p in self.group.fsdp_params]
        return [p for p in sharded if p.requires_grad]

    def stand_in(self) -> nn.Parameter:
        """What the steps know of the flat vector, its length and dtype; it takes no memory."""
        first, policy = self.trainable[0], self.group.mp_policy
        dtype = policy.reduce_dtype or policy.param_dtype or first.dtype
        numel = sum(_padded_numel(p) for p in self.trainable)
        return nn.Parameter(torch.zeros(1, dtype=dtype, device=first.device).expand(numel))


class ShardedHookState(ExchangeBase):
    """The exchange of a model that fully_shard has sharded: see `regtopk.attach`.

    A step is a backward that reduces gradients. A unit that no step used sends nothing and keeps its
    residual.
    """

    def __init__(
        self, model: nn.Module, algorithm: Algorithm[Any], replicate_group: object, options: Options
    ) -> None:
        group = group_of("replicate_group", replicate_group)
        units = _units_of(model)
        shards = Shards({name: p for name, p in model.named_parameters() if p.requires_grad}, group)
        parameters = Parameters([(unit.name, unit.stand_in()) for unit in units])
        steps = Steps(parameters, algorithm, Collectives(group), options, Kind("regtopk.attach"), shards)
        super().__init__(steps, _sharding_of(model, units))
        for unit in units:
            steps.buckets.covering((unit.name,))  # each is a bucket of its own
        if self.num_workers == 1:
            _log.warning("there is one replica: its gradients are sparsified, but nothing is sent")
        self._units = units
        self._blocks = _blocks_for(steps.parameters, units)
        self._flats = {
            name: row for names, block in self._blocks for name, row in zip(names, block, strict=True)
        }
        self._sizes_of = {unit.name: (unit, list(map(_padded_numel, unit.trainable))) for unit in units}
        self._arrived: dict[str, Tensor | None] = {}  # units in this backward: see `_arrival`
        self._last_arrival = torch.cuda.Event() if steps.device.type == "cuda" else None
        self._backward = -1  # the one that makes the current step
        self._is_detached = False
        for unit in units:
            unit.module.set_all_reduce_hook(partial(self._on_gradient, unit.name))

    def detach(self) -> None:
        """Go back to dense: from the next backward on, gradients are the plain mean over the replicas.

        What was not sent yet is dropped: save `state_dict()` before, to go on from it later. Call it on every
        rank, between two steps. Then `attach` may be called again.
        """
        self._steps.close("detach")
        # sets the memory of residuals and gradients free
        self._steps.buckets.all, self._blocks, self._flats = [], [], {}
        self._steps.forget_rows()
        self._is_detached = True
        for unit in self._units:
            unit.module.set_all_reduce_hook(_DenseMean(self._collectives))

    def summary(self) -> str:
        """What this rank sent until it was detached, if it was, and where the time went."""
        dense = "\n  detached  the residual was dropped; the dense steps since are not counted here"
        return super().summary() + (dense if self._is_detached else "")

    @torch.no_grad()
    def _on_gradient(self, name: str, flat: Tensor) -> None:
        """Take a unit's vector; what FSDP adds to the gradients, or makes of them, is then zero."""
        steps = self._steps
        steps.check_usable()
        own = self._flats[name]
        if flat.numel() != own.numel():
            raise ClusterError(
                f"gradient of FSDP unit {name!r} must have {own.numel()} entries, of all its parameters that "
                f"required a gradient when it was attached, got {flat.numel()}: a backward must use all of a "
                "unit's parameters or none (torch's set_reduce_scatter_unused_params(True) fills in zeros)"
            )
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # the last one may have failed before its end
            self._backward, self._arrived = backward, {}
            _after_backward(self._end_step)
        if name in self._arrived:  # a unit that is used twice may arrive twice
            own.add_(flat)
            self._arrived[name] = None
        else:
            own.copy_(flat)
            self._arrived[name] = self._becomes_gradient(name, flat)
        flat.zero_()
        if self._last_arrival is not None:  # FSDP has streams of its own
            stream = torch.cuda.current_stream(flat.device.index)
            flat.record_stream(stream)  # which FSDP does not, and may use its memory again
            self._last_arrival.record(stream)

    def _becomes_gradient(self, name: str, flat: Tensor) -> Tensor | None:
        """The vector, if FSDP makes all the unit's gradients views of it: it does so where there are none."""
        unit, _ = self._sizes_of[name]
        if any(p.grad is not None or p.dtype != flat.dtype for p in unit.trainable):
            return None
        return flat

    @torch.no_grad()
    def _end_step(self) -> None:
        """Exchange all units that have arrived, and add the aggregates to the gradients."""
        steps = self._steps
        if self._units[0].module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued:
            raise ClusterError(  # this was a backward inside FSDP's, which goes on
                "activation checkpoints around FSDP units must be made with use_reentrant=False, got one "
                "that runs a backward of its own (use_reentrant=True)"
            )
        if self._last_arrival is not None:
            self._last_arrival.wait(torch.cuda.current_stream(steps.device.index))
        arrived, self._arrived = self._arrived, {}
        are_finite = [steps.unscale_(flat) for flat in self._vectors_of(arrived.keys())]
        grads: list[Tensor] = []
        with steps.lock:
            steps.begin()
            buckets = [bucket for bucket in steps.buckets.all if bucket.names[0] in arrived]
            steps.agree_later(buckets, torch.stack(are_finite).all())
            with steps.half_way():
                if steps.is_finite:
                    parts: list[Tensor] = []
                    flats = [self._flats[bucket.names[0]] for bucket in buckets]
                    steps.exchange(buckets, flats, partial(self._collect, arrived, grads, parts))
                    torch._foreach_add_(grads, parts)  # FSDP has made the gradients of zeros
            steps.end()
        # no part may make a step alone: also gradients of units that did not arrive become NaN
        spoiled = [unit for unit in self._units if not steps.is_finite or unit.name not in arrived]
        grads += [local(p.grad) for unit in spoiled for p in unit.trainable if p.grad is not None]
        if steps.is_bad is not None:
            torch._foreach_mul_(grads, torch.where(steps.is_bad, math.nan, 1.0))
        elif not steps.is_finite:
            torch._foreach_mul_(grads, math.nan)

    def _vectors_of(self, arrived: Collection[str]) -> list[Tensor]:
        """All that has arrived, in as few pieces as can be."""
        pieces: list[Tensor] = []
        for names, block in self._blocks:
            here = [name for name in names if name in arrived]
            pieces += [block] if here == names else [self._flats[name] for name in here]
        return pieces

    def _collect(
        self,
        arrived: Mapping[str, Tensor | None],
        grads: list[Tensor],
        parts: list[Tensor],
        names: Sequence[str],
        aggregate: Tensor,
        _: kernels.Support | None,
        __: bool,
    ) -> None:
        """The gradients of a unit, all in one where they are, and what the aggregate is for each of them."""
        unit, sizes = self._sizes_of[names[0]]
        whole = arrived[names[0]]
        if whole is not None and unit.trainable[0].grad._local_tensor.data_ptr() == whole.data_ptr():
            grads.append(whole)
            parts.append(aggregate)
            return
        mine = [p.grad._local_tensor for p in unit.trainable]  # to_local() takes longer than the sum
        padded = aggregate.split(sizes)
        if [grad.numel() for grad in mine] != sizes:
            padded = [part[: grad.numel()] for part, grad in zip(padded, mine, strict=True)]
        grads += mine
        parts += map(Tensor.view_as, padded, mine)


class _DenseMean:
    """What torch does over the replicas of a mesh of two dimensions."""

    def __init__(self, replicas: Collectives) -> None:
        self._replicas = replicas

    def __call__(self, flat: Tensor) -> None:
        if self._replicas.num_workers > 1:
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self._replicas.group)


def _units_of(model: nn.Module) -> list[Unit]:
    """The units of a model that have something to train, by name; refuses those that cannot be exchanged."""
    modules: dict[str, Any] = {name: module for name, module in model.named_modules() if is_fsdp2(module)}
    for module in modules.values():
        module.reshard()  # after an evaluation some are whole
    names: dict[int, list[str]] = {}
    groups: dict[int, tuple[Any, Any]] = {}
    for name, module in modules.items():
        for group in groups_of(name or "<root>", module):
            names.setdefault(id(group), []).append(name or "<root>")
            groups[id(group)] = module, group
    units = [Unit(", ".join(names[key]), *groups[key]) for key in groups]
    units = [unit for unit in units if unit.trainable]
    _check_parameters(model, units)
    for unit in units:
        if not isinstance(unit.group._all_reduce_hook, (_DenseMean, type(None))):
            raise ClusterError(
                f"attach must be called once for a model: FSDP unit {unit.name!r} has an all-reduce hook "
                "already"
            )
        if type(unit.group.offload_policy).__name__ == "CPUOffloadPolicy":
            raise ClusterError(
                f"offload_policy of FSDP unit {unit.name!r} must not be CPUOffloadPolicy, whose gradients "
                "are not where its parameters are: exchange updates instead, by regtopk.UpdateExchange over "
                "a group with gloo for the CPU"
            )
    return units


def _check_parameters(model: nn.Module, units: list[Unit]) -> None:
    """Every parameter to train must be in a unit, sharded over the one axis of its mesh."""
    pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not pairs:
        raise ClusterError("model must hold at least one parameter that requires a gradient, got none")
    check_placements(pairs)
    held = {id(p) for unit in units for p in unit.trainable}
    for name, p in pairs:
        if id(p) not in held or not p.placements[0].is_shard(0):  # type: ignore[attr-defined]
            raise ClusterError(
                f"parameter {name!r} must be sharded by fully_shard along dimension 0, got a DTensor that is "
                f"{p.placements[0]}"  # type: ignore[attr-defined]
            )


def _sharding_of(model: nn.Module, units: list[Unit]) -> Sharding:
    """Where the parameters are in the units' vectors."""
    wholes = {name: p for name, p in model.named_parameters() if p.requires_grad}
    names = {id(p): name for name, p in wholes.items()}
    pieces = []
    for unit in units:
        start = 0
        for p in unit.trainable:
            pieces.append(Piece(unit.name, names[id(p)], start))
            start += _padded_numel(p)
    return Sharding(wholes, pieces)


def _blocks_for(parameters: Parameters, units: list[Unit]) -> list[tuple[list[str], Tensor]]:
    """Where the units' gradients are kept until backward is over: (U, J), a row for each of one size."""
    kinds: dict[Any, list[str]] = {}
    for unit in units:
        p = parameters.named[unit.name]
        kinds.setdefault((p.numel(), flat_dtype([p]), p.device), []).append(unit.name)
    return [
        (names, torch.zeros(len(names), numel, dtype=dtype, device=device))
        for (numel, dtype, device), names in kinds.items()
    ]


def _padded_numel(p: Any) -> int:
    """How many entries of the flat vector are a parameter's: as many on every rank."""
    rows = -(-p.shape[0] // p.device_mesh.size())
    return int(rows * p.shape[1:].numel())


def _after_backward(callback: Any) -> None:
    """Run a callback when this backward is over, and FSDP's own ends of it, in which some hooks run.

    FSDP queues those before: a callback that queues another comes later than all of them.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(callback))
