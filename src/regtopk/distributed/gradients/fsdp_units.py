"""The units of a model that fully_shard (FSDP2) has sharded: what is reduced, and exchanged, together."""

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regtopk.distributed.state.saved_shards import Piece, Sharding
from regtopk.distributed.state.shards import check_placements, groups_of, local, refuse_hooks, units_by_name
from regtopk.errors import ClusterError

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Unit(NamedTuple):
    """A module that fully_shard was called on, or several that were sharded together."""

    name: str
    module: Any  # an FSDPModule
    group: Any  # torch's FSDPParamGroup: the parameters that are communicated together
    members: list[Any]  # torch's FSDPParams in it that require a gradient, in the order of the flat vector

    @property
    def trainable(self) -> list[Any]:
        """Its sharded parameters that require a gradient."""
        return [member.sharded_param for member in self.members]  # loading may put others in their place

    def gradients(self) -> list[Tensor]:
        """This rank's parts of the gradients that there are."""
        grads = [p.grad for p in self.trainable]
        return [grad._local_tensor for grad in grads if grad is not None]  # to_local() takes long

    def stand_in(self) -> nn.Parameter:
        """What the steps know of the flat vector, its length and dtype; it takes no memory."""
        first, policy = self.trainable[0], self.group.mp_policy
        dtype = policy.reduce_dtype or policy.param_dtype or first.dtype
        numel = sum(map(_padded_numel, self.trainable))
        return nn.Parameter(torch.zeros(1, dtype=dtype, device=first.device).expand(numel))

    def places(self) -> list[int]:
        """Where each of its parameters starts in the flat vector."""
        *starts, _ = accumulate(map(_padded_numel, self.trainable), initial=0)
        return starts

    def check(self) -> None:
        """Refuse what cannot be exchanged."""
        if type(self.group.offload_policy).__name__ == "CPUOffloadPolicy":
            raise ClusterError(
                f"offload_policy of FSDP unit {self.name!r} must not be CPUOffloadPolicy, whose gradients "
                "are not where its parameters are: exchange updates instead, by regtopk.UpdateExchange over "
                "a group with gloo for the CPU"
            )
        self.check_division(self.stand_in().dtype)

    def check_division(self, dtype: torch.dtype) -> None:
        """FSDP must have divided the gradients by the number of shards before the hook gets them."""
        is_sum = getattr(self.group, "force_sum_reduction_for_comms", False)
        factor = getattr(self.group, "gradient_divide_factor", None)
        is_divided = dtype in (torch.float32, torch.bfloat16) or (
            factor is None and self.trainable[0].device_mesh.size() <= 2
        )
        if is_sum or not is_divided:
            raise ClusterError(
                f"gradients of FSDP unit {self.name!r} must be divided by the number of shards before the "
                f"all-reduce hook: reduce_dtype must be float32 or bfloat16, got {dtype}, and "
                "set_force_sum_reduction_for_comms must not be used"
            )


def units_of(model: nn.Module) -> list[Unit]:
    """All units of a model; refused if something to train in them cannot be exchanged."""
    refuse_hooks(model)
    modules = units_by_name(model)
    for _, module in modules:
        module.reshard()  # after an evaluation some are whole
    units: dict[int, Unit] = {}  # by their group: several modules may share one
    for name, module in modules:
        for group in groups_of(name, module):
            names = name if id(group) not in units else f"{units[id(group)].name}, {name}"
            members = [member for member in group.fsdp_params if member.sharded_param.requires_grad]
            units[id(group)] = Unit(names, module, group, members)
    pairs = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    check_placements(pairs)
    held = {id(p) for unit in units.values() for p in unit.trainable}
    for name, p in pairs:
        (placement,) = p.placements  # type: ignore[attr-defined]
        if id(p) not in held or not placement.is_shard(0):
            raise ClusterError(
                f"parameter {name!r} must be sharded by fully_shard along dimension 0, got a DTensor that is "
                f"{placement!r}"
            )
    for unit in units.values():
        if unit.members:
            unit.check()
    return list(units.values())


def sharding_of(wholes: dict[str, nn.Parameter], units: Iterable[Unit]) -> Sharding:
    """Where the parameters are in the units' vectors."""
    names: dict[Any, str] = {p: name for name, p in wholes.items()}
    pieces = []
    for unit in units:
        starts = zip(unit.trainable, unit.places(), strict=True)
        pieces += [Piece(unit.name, names[p], start) for p, start in starts]
    return Sharding(wholes, pieces)


def _padded_numel(p: Any) -> int:
    """How many entries of the flat vector are a parameter's: as many on every rank."""
    rows = -(-p.shape[0] // p.device_mesh.size())
    return int(rows * p.shape[1:].numel())


def bits_of(model: nn.Module) -> dict[str, int]:
    """A sum over the bits of this rank's part of each parameter."""
    bits = {n: local(p).contiguous().view(_INTEGERS[p.itemsize]) for n, p in model.named_parameters()}
    return {name: int(each.sum(dtype=torch.int64)) for name, each in bits.items()}
