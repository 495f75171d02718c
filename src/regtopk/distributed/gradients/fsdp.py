"""For users of fully_shard (FSDP2): a hook that exchanges over the replicas of a sharded model.

FSDP reduces the gradients of a unit to this rank's part of them: one flat vector, the parts of all the unit's
parameters one after another, each padded to the size of the largest part. The hook copies this vector and
leaves zeros; if FSDP makes the gradients views of it, the hook waits with that until backward is over. Then
all units are exchanged with the ranks that hold the same parts. Entries are selected within each unit.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regtopk import kernels
from regtopk.core.algorithm import Algorithm
from regtopk.distributed.gradients.fsdp_units import (
    Unit,
    all_units_of,
    bits_of,
    check_division,
    check_units,
    modules_of,
    places_of,
    sharding_of,
)
from regtopk.distributed.options import Options, refuse_k
from regtopk.distributed.state.buckets import Bucket
from regtopk.distributed.state.layout import flat_dtype
from regtopk.distributed.state.parameters import Parameters, after_backward
from regtopk.distributed.state.shards import DenseMean, Shards, local, replicas_of
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.transport.collectives import Collectives
from regtopk.errors import ArgumentError, ClusterError

_log = logging.getLogger("regtopk")


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
        everything = all_units_of(model)
        units = [unit for unit in everything if unit.members]
        check_units(model, units)
        shards = Shards({name: p for name, p in model.named_parameters() if p.requires_grad}, group)
        parameters = Parameters([(unit.name, unit.stand_in()) for unit in units])
        kind = Kind("regtopk.attach", parts=tuple((unit.name,) for unit in units))
        steps = Steps(parameters, algorithm, Collectives(group), options, kind, shards)
        super().__init__(steps, sharding_of(model, units))
        if self.num_workers == 1:
            _log.warning("there is one replica: its gradients are sparsified, but nothing is sent")
        self._units = {unit.name: unit for unit in units}
        self._blocks = _blocks_for(steps.parameters, units)
        self._flats = {
            name: flat
            for names, block in self._blocks
            for name, flat in zip(
                names, block.split([steps.parameters.named[n].numel() for n in names]), strict=True
            )
        }
        self._places = {unit.name: places_of(unit) for unit in units}  # of its parameters in its vector
        # units in this backward, and their vectors if the gradients are views of them
        self._arrived: dict[str, Tensor | None] = {}
        self._streams: set[Any] = set()  # that FSDP has run the hook on
        self._backward = -1  # the one that makes the current step
        self._model, self._everything, self._shards = model, everything, shards
        self._modules = modules_of(model)
        self._are_compared = False  # whether the replicas have begun alike
        for unit in everything:
            hook = self._on_gradient if unit.members else self._on_frozen
            unit.module.set_all_reduce_hook(partial(hook, unit.name))

    def detach(self) -> None:
        """Go back to dense: from the next backward on, gradients are the plain mean over the replicas.

        What was not sent yet is dropped: save `state_dict()` before, to go on from it later. Call it on every
        rank, between two steps. Then `attach` may be called again, or `UpdateExchange` be made, which ends
        that mean.
        """
        self._steps.drop()
        self._clear_arrived()
        self._blocks, self._flats = [], {}  # sets their memory free
        self._is_detached = True
        for unit in self._everything:
            unit.module.set_all_reduce_hook(DenseMean(self._collectives))

    @torch.no_grad()
    def _on_gradient(self, name: str, flat: Tensor) -> None:
        """Take a unit's vector, at once or, if FSDP makes the gradients of it, when backward is over."""
        steps = self._steps
        steps.check_usable()
        own = self._flats[name]
        if flat.numel() != own.numel():
            raise ClusterError(
                f"gradient of FSDP unit {name!r} must have {own.numel()} entries, of all its parameters that "
                f"required a gradient when it was attached, got {flat.numel()}: a backward must use all of a "
                "unit's parameters or none (torch's set_reduce_scatter_unused_params(True) fills in zeros)"
            )
        check_division(self._units[name], flat.dtype)
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._clear_arrived()  # the last one may have failed before its end
            self._backward = backward
            after_backward(self._end_step)
        earlier = self._arrived.get(name)
        if earlier is not None:  # a unit that is used twice may arrive twice
            own.copy_(earlier)
            earlier.zero_()
        if name not in self._arrived and self._becomes_gradient(name, flat):
            self._arrived[name] = flat
        else:
            own.add_(flat) if name in self._arrived else own.copy_(flat)
            flat.zero_()
            self._arrived[name] = None
        if flat.is_cuda:  # FSDP has streams of its own
            stream = torch.cuda.current_stream(flat.device)
            self._streams.add(stream)
            flat.record_stream(stream)  # FSDP may use its memory again

    def _on_frozen(self, name: str, _: Tensor) -> None:
        raise ClusterError(
            f"parameters of FSDP unit {name!r} must have required a gradient when it was attached, got "
            "gradients of them now: call detach(), and attach again"
        )

    def _check_model(self) -> None:
        """Refuse a model that has changed; and replicas that do not begin alike, which would stay apart."""
        if modules_of(self._model) != self._modules:
            raise ClusterError(
                "modules and parameters of a model must stay what they were when it was attached: call "
                "detach(), and attach again"
            )
        if self._are_compared:
            return
        for difference in self._shards.collectives.all_gather_objects(self._find_difference()):
            if difference is not None:
                raise ClusterError(
                    "parameters must be the same on all replicas before the first step, but "
                    f"{difference}: seed all replicas alike, or load the same weights"
                )
        self._are_compared = True

    def _find_difference(self) -> str | None:
        """The first parameter that another replica has other values of, and where; None if there is none."""
        members = [member for unit in self._everything for member in unit.group.fsdp_params]
        everyone = self._collectives.all_gather(bits_of(members)).cpu()
        differences = (everyone != everyone[0]).nonzero().tolist()
        if not differences:
            return None
        replica, which = differences[0]
        names = {id(p): name for name, p in self._model.named_parameters()}
        ranks = self._collectives.ranks
        name = names[id(members[which].sharded_param)]
        return f"{name!r} differs between ranks {ranks[0]} and {ranks[replica]}"

    def _becomes_gradient(self, name: str, flat: Tensor) -> bool:
        """Whether FSDP makes the unit's gradients views of the vector, as it does where there are none.

        A user's hook on them would then see what is not exchanged yet.
        """
        dtype = flat.dtype
        for p in self._units[name].trainable:
            if p.grad is not None or p.dtype != dtype or p._post_accumulate_grad_hooks:
                return False
        return True

    def _clear_arrived(self) -> None:
        """Drop what has arrived: of gradients that are views of it, nothing is left."""
        for flat in self._arrived.values():
            if flat is not None:
                flat.zero_()
        self._arrived = {}

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
        arrived, self._arrived = self._arrived, {}
        wholes = {name: flat for name, flat in arrived.items() if flat is not None}
        grads: list[Tensor] = []
        with self._cleared_if_it_fails(wholes):
            self._check_model()
            buckets = [bucket for bucket in steps.buckets.all if bucket.names[0] in arrived]
            with steps.step(partial(self._take, buckets, arrived), buckets, may_go_on=True) as step:
                if step.is_finite:
                    aggregates: dict[str, Tensor] = {}
                    step.exchange(lambda names, vector, *_: aggregates.update({names[0]: vector}))
                    grads = self._add(aggregates, wholes)
        # no part may make a step alone: also gradients of units that did not arrive become NaN
        others = [unit for name, unit in self._units.items() if not step.is_finite or name not in arrived]
        grads += [local(p.grad) for unit in others for p in unit.trainable if p.grad is not None]
        if grads and step.is_spoilt is not None:
            kernels.overwrite_if_(step.is_spoilt, grads, math.nan)
        elif grads and not step.is_finite:
            torch._foreach_mul_(grads, math.nan)

    @contextmanager
    def _cleared_if_it_fails(self, wholes: Mapping[str, Tensor]) -> Iterator[None]:
        """Leave zeros, not what no other replica has, where a user may go on from an error."""
        try:
            yield
        except BaseException:
            for flat in wholes.values():
                flat.zero_()
            raise

    def _take(
        self, buckets: list[Bucket], arrived: Mapping[str, Tensor | None]
    ) -> tuple[list[Tensor], Tensor]:
        """Copy what has arrived and is still with FSDP; is all of it finite without the scale?"""
        are_finite: list[Tensor] = []
        for names, block in self._blocks:
            wholes = [flat for name in names if (flat := arrived.get(name)) is not None]
            if len(wholes) == len(names):
                are_finite.append(self._steps.unscale_(block, kernels.join_(block, wholes)))
            else:
                here = [name for name in names if name in arrived]
                if wholes:
                    into = [self._flats[name] for name in here if arrived[name] is not None]
                    torch._foreach_copy_(into, wholes)
                taken = [block] if here == names else [self._flats[name] for name in here]
                are_finite += map(self._steps.unscale_, taken)
        is_finite = torch.stack(are_finite).all() if len(are_finite) > 1 else are_finite[0]
        return [self._flats[bucket.names[0]] for bucket in buckets], is_finite

    def _add(self, aggregates: Mapping[str, Tensor], wholes: Mapping[str, Tensor]) -> list[Tensor]:
        """Add the units' aggregates to their gradients, or write them where these are views.

        Returns:
            All that was written to.
        """
        grads: list[Tensor] = []
        parts: list[Tensor] = []
        for name, aggregate in aggregates.items():
            self._check_gradients(name, wholes.get(name))
            if name not in wholes:
                # to_local() takes longer than the sum
                mine = [p.grad._local_tensor for p in self._units[name].trainable]
                places = zip(self._places[name], mine, strict=True)
                grads += mine
                parts += [aggregate[start : start + numel].view_as(g) for (start, numel), g in places]
        if grads:
            torch._foreach_add_(grads, parts)
        if wholes:
            torch._foreach_copy_(list(wholes.values()), [aggregates[name] for name in wholes])
        return grads + list(wholes.values())

    def _check_gradients(self, name: str, whole: Tensor | None) -> None:
        """Refuse a unit whose gradients a user has taken away, or put others in the place of."""
        start = 0 if whole is None else whole.data_ptr()
        for p, (offset, numel) in zip(self._units[name].trainable, self._places[name], strict=True):
            grad = p.grad
            is_there = grad is not None
            if is_there and whole is not None and numel > 0:
                is_there = grad._local_tensor.data_ptr() == start + offset * whole.itemsize
            if not is_there:
                raise ClusterError(
                    f"gradients of FSDP unit {name!r} must not be replaced or removed before backward is over"
                )


def _blocks_for(parameters: Parameters, units: list[Unit]) -> list[tuple[list[str], Tensor]]:
    """Where the units' gradients are kept until backward is over: one vector for all of one dtype.

    Units of one size come one after another, so that those that are alike can be computed together.
    """
    named = parameters.named
    dtypes: dict[torch.dtype, list[str]] = {}
    for name in sorted((unit.name for unit in units), key=lambda name: named[name].numel()):
        dtypes.setdefault(flat_dtype([named[name]]), []).append(name)
    return [
        (names, torch.zeros(sum(named[n].numel() for n in names), dtype=dtype, device=parameters.device))
        for dtype, names in dtypes.items()
    ]
