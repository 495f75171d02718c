"""For users of fully_shard (FSDP2): a hook that exchanges over the replicas of a sharded model.

FSDP reduces the gradients of a unit to this rank's part of them: one flat vector, the parts of all the unit's
parameters one after another, each padded to the size of the largest part. The hook copies this vector and
leaves zeros. When backward is over, all units are exchanged with the ranks that hold the same parts, and the
aggregates are added to the gradients. Entries are selected within each unit.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regtopk import kernels
from regtopk.core.algorithm import Algorithm
from regtopk.distributed.gradients.fsdp_units import Unit, bits_of, sharding_of, units_of
from regtopk.distributed.options import Options, refuse_k
from regtopk.distributed.state.buckets import Bucket, as_flat, flat_dtype
from regtopk.distributed.state.parameters import Parameters, after_backward, modules_of
from regtopk.distributed.state.shards import DenseMean, Shards, replicas_of
from regtopk.distributed.steps.attached import watch_optimizer
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.steps.handshake import difference
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.transport.collectives import Collectives
from regtopk.errors import ArgumentError, ClusterError, log


class ShardedHookState(ExchangeBase):
    """The exchange of a model that fully_shard has sharded: see `regtopk.attach`.

    A step is a backward that reduces gradients. A unit that no step used sends nothing and keeps its
    residual.
    """

    def __init__(self, model: nn.Module, algorithm: Algorithm[Any], options: Options) -> None:
        if options.skip is not None:
            raise ArgumentError(
                "skip must be None for a fully_shard'ed model, whose units are exchanged whole, got "
                f"{options.skip!r}"
            )
        group = replicas_of(options.process_group)
        refuse_k(algorithm)
        self._everything = units_of(model)
        self._units = {unit.name: unit for unit in self._everything if unit.members}
        units = self._units.values()
        wholes = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._shards = Shards(wholes, group)
        parameters = Parameters([(unit.name, unit.stand_in()) for unit in units])
        kind = Kind("regtopk.attach", parts=tuple((unit.name,) for unit in units))
        steps = Steps(parameters, algorithm, Collectives(group, options.link), options, kind, self._shards)
        super().__init__(steps, sharding_of(wholes, units))
        if self.num_workers == 1:
            log.warning("there is one replica: its gradients are sparsified, but nothing is sent")
        self._places = {unit.name: unit.places() for unit in units}  # of its parameters in its vector
        self._flats = _room_for(parameters)
        self._arrived: set[str] = set()  # the units in this backward
        self._streams: set[Any] = set()  # that FSDP has run the hook on
        self._backward = -1  # the one that makes the current step
        self._model, self._modules = model, _modules_of(model)
        watch_optimizer(self)
        self._are_compared = False  # whether the replicas have begun alike
        for unit in self._everything:
            unit.module.set_all_reduce_hook(partial(self._on_gradient, unit.name))

    def detach(self) -> None:
        """Go back to dense: gradients are the plain mean over the replicas. What was not sent yet is dropped.

        Then `attach` may be called again, or `UpdateExchange` be made, which ends that mean.
        """
        self._steps.drop()
        self._flats = {}  # sets their memory free
        self._is_detached = True
        for unit in self._everything:
            unit.module.set_all_reduce_hook(DenseMean(self._collectives))

    def _trained(self) -> Iterable[nn.Parameter]:
        return self._model.parameters()

    @torch.no_grad()
    def _on_gradient(self, name: str, flat: Tensor) -> None:
        """Take a unit's vector, and leave zeros: FSDP makes the gradients of them, or adds them."""
        self._steps.check_usable()
        own = self._flats.get(name, flat[:0])
        if flat.numel() != own.numel():
            raise ClusterError(
                f"gradient of FSDP unit {name!r} must have {own.numel()} entries, of all its parameters that "
                f"required a gradient when it was attached, got {flat.numel()}: a backward must use all of a "
                "unit's parameters or none (torch's set_reduce_scatter_unused_params(True) fills in zeros); "
                "to unfreeze some, call detach(), and attach again"
            )
        self._units[name].check_division(flat.dtype)
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._arrived = set()  # the last one may have failed before its end
            self._backward = backward
            after_backward(self._end_step)
        own.add_(flat) if name in self._arrived else own.copy_(flat)  # a unit may arrive twice
        flat.zero_()
        self._arrived.add(name)
        if flat.is_cuda:  # FSDP has streams of its own
            stream = torch.cuda.current_stream(flat.device)
            self._streams.add(stream)
            flat.record_stream(stream)  # FSDP may use its memory again

    def _check_model(self) -> None:
        """Refuse a model that has changed; and replicas that do not begin alike, which would stay apart."""
        if _modules_of(self._model) != self._modules:
            raise ClusterError(
                "modules and parameters of a model must stay what they were when it was attached: call "
                "detach(), and attach again"
            )
        if self._are_compared:
            return
        found = difference(self._collectives, bits_of(self._model))
        for theirs in self._shards.collectives.all_gather_objects(found):
            if theirs is not None:
                raise ClusterError(
                    "all replicas must begin with the same parameters (seed them alike, or load the same "
                    f"weights), but a checksum differs: {theirs}"
                )
        self._are_compared = True

    @torch.no_grad()
    def _end_step(self) -> None:
        """Exchange all units that have arrived, and add the aggregates to the gradients."""
        steps = self._steps
        unit, *_ = self._units.values()
        if unit.module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued:
            raise ClusterError(  # this was a backward inside FSDP's, which goes on
                "activation checkpoints around FSDP units must be made with use_reentrant=False, got one "
                "that runs a backward of its own (use_reentrant=True)"
            )
        for stream in self._streams:
            torch.cuda.current_stream(steps.device).wait_stream(stream)
        self._check_model()
        grads = {name: self._gradients(unit) for name, unit in self._units.items()}
        buckets = [bucket for bucket in steps.buckets.all if bucket.names[0] in self._arrived]
        with steps.step(partial(self._take, buckets), buckets, may_go_on=True) as step:
            if step.is_finite:
                aggregates: dict[str, Tensor] = {}
                step.exchange(lambda names, vector, *_: aggregates.update({names[0]: vector}))
                pieces = [(aggregates[name], *piece) for name in aggregates for piece in grads[name]]
                parts = [whole[start : start + grad.numel()].view_as(grad) for whole, start, grad in pieces]
                torch._foreach_add_([grad for *_, grad in pieces], parts)
        # no part may make a step alone: also gradients of units that did not arrive become NaN
        everything = [grad for mine in grads.values() for _, grad in mine]
        if step.agreement.is_spoilt is not None:
            kernels.overwrite_if_(step.agreement.is_spoilt, everything, math.nan)
        elif not step.is_finite:
            torch._foreach_mul_(everything, math.nan)

    def _take(self, buckets: list[Bucket]) -> tuple[list[Tensor], Tensor]:
        """The vectors of the units that have arrived; are all finite without the scale?"""
        flats = [self._flats[bucket.names[0]] for bucket in buckets]
        in_memory = [flat for name, flat in self._flats.items() if name in self._arrived]
        block = as_flat(in_memory, flats[0].dtype)  # one look is faster than many
        are_finite = [self._steps.unscale_(vector) for vector in (flats if block is None else [block])]
        return flats, torch.stack(are_finite).all()

    def _gradients(self, unit: Unit) -> list[tuple[int, Tensor]]:
        """A unit's gradients, and where each starts in its vector; as one if they lie in memory like that."""
        grads, own = unit.gradients(), self._flats[unit.name]
        if unit.name in self._arrived and len(grads) < len(unit.members):
            raise ClusterError(f"gradients of FSDP unit {unit.name!r} must stay until backward is over")
        whole = as_flat(grads, own.dtype) if grads else None
        if whole is not None and whole.numel() == own.numel():
            return [(0, whole)]
        return list(zip(self._places[unit.name], grads, strict=False))  # fewer of a unit that did not arrive


def _modules_of(model: nn.Module) -> tuple[list[nn.Module], int]:
    """All modules, and how many parameters they have: counted, because FSDP replaces the objects."""
    found = modules_of(model)
    return found, sum(len(module._parameters) for module in found)


def _room_for(parameters: Parameters) -> dict[str, Tensor]:
    """Where units' gradients are kept until backward is over, in the order of memory: a block for each dtype.

    Units of one size come one after another, so that those that are alike can be computed together.
    """
    flats: dict[str, Tensor] = {}
    named = sorted(parameters.named.items(), key=lambda item: item[1].numel())
    for dtype in {flat_dtype([p]) for _, p in named}:
        sizes = {name: p.numel() for name, p in named if flat_dtype([p]) == dtype}
        block = torch.zeros(sum(sizes.values()), dtype=dtype, device=parameters.device)
        flats |= zip(sizes, block.split(list(sizes.values())), strict=True)
    return flats
