"""What `attach` refuses of sharded models, before anything has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import regtopk
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.sharding import grid, replica, sharded
from tests.distributed.training import loss_of, make_net, refusal

TOPK = regtopk.TopK(density=0.1)
Act = Callable[[], Any]


def attach(model: Any = None, algorithm: Any = TOPK, **options: Any) -> Any:
    options = {"process_group": grid(2, 2)["replicate"], **options}
    return regtopk.attach(sharded(grid(2, 2)["shard"]) if model is None else model, algorithm, **options)


def after_updates() -> None:
    model = sharded(grid(2, 2)["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = regtopk.UpdateExchange(model, optimizer, TOPK, process_group=grid(2, 2)["replicate"])
    try:
        attach(model)
    finally:
        exchange.close()
    attach(model)


def twice() -> None:
    model = sharded(grid(2, 2)["shard"])
    attach(model)
    attach(model)


def by_columns() -> Any:
    net = nn.Sequential(nn.Linear(4, 4))
    return fully_shard(net, mesh=grid(2, 2)["shard"], shard_placement_fn=lambda p: Shard(p.ndim - 1))


def partly_plain() -> Any:
    net = make_net()
    fully_shard(net.first, mesh=grid(2, 2)["shard"])
    return net


def on_two_meshes() -> Any:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net[0], mesh=grid(2, 2)["replicate"])
    return fully_shard(net, mesh=grid(2, 2)["shard"])


def with_groups() -> Any:
    """A stand-in: torch makes such units for parameters on meshes of their own."""
    model = sharded(grid(2, 2)["shard"])
    state = model.extra._get_fsdp_state()
    state._fsdp_param_groups = state._fsdp_param_groups * 2
    return model


def summing() -> Any:
    model = sharded(grid(2, 2)["shard"])
    model.set_force_sum_reduction_for_comms(True)
    return model


def divided_by_eight() -> Any:
    model = sharded(grid(2, 2)["shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    model.set_gradient_divide_factor(8.0)
    return model


def summing_later() -> None:
    model = sharded(grid(2, 2)["shard"])
    attach(model)
    model.set_force_sum_reduction_for_comms(True)
    loss_of(model, 0).backward()


def on_meta() -> Any:
    with torch.device("meta"):
        return fully_shard(nn.Linear(4, 4), mesh=grid(2, 2)["shard"])


def with_another_module() -> None:
    model = sharded(grid(2, 2)["shard"])
    attach(model)
    loss_of(model, 0).backward()
    model.later = fully_shard(nn.Linear(4, 4), mesh=grid(2, 2)["shard"])
    loss_of(model, 1).backward()


def with_a_module_replaced() -> None:
    model = sharded(grid(2, 2)["shard"])
    attach(model)
    model.extra = fully_shard(make_net().extra, mesh=grid(2, 2)["shard"])
    loss_of(model, 0).backward()


def unfrozen_later() -> None:
    model = sharded(grid(2, 2)["shard"])
    model.extra.requires_grad_(False)
    attach(model)
    loss_of(model, 0).backward()
    model.extra.requires_grad_(True)
    loss_of(model, 1).backward()


def beginning_apart() -> None:
    model = sharded(grid(2, 2)["shard"])
    attach(model)
    if dist.get_rank() == 3:  # others that share its replica hear of it, too
        with torch.no_grad():
            model.last.bias.to_local().add_(1)
    loss_of(model, 0).backward()


def use_a_part() -> None:
    model: Any = fully_shard(make_net(), mesh=grid(2, 2)["shard"])  # one unit
    attach(model)
    loss_of(model, 0, with_extra=False).backward()


class Reentrant(nn.Module):
    """A layer under an activation checkpoint that runs a backward in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return checkpoint(self.layer, x, use_reentrant=True)


def backward_inside_another() -> None:
    mesh = grid(2, 2)["shard"]
    net: Any = make_net()
    net.middle = Reentrant(fully_shard(net.middle, mesh=mesh))
    fully_shard(net, mesh=mesh)
    attach(net)
    loss_of(net, 0).backward()


def after_close() -> None:
    model = sharded(grid(2, 2)["shard"])
    attach(model).close()
    loss_of(model, 0).backward()


def crossed() -> Any:
    """Ranks 0 and 3, and 1 and 2: replicas of different parts."""
    groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    return groups[dist.get_rank() in (1, 2)]


def by_replica(*choices: Any) -> Any:
    return choices[replica()]


def by_part(*choices: Any) -> Any:
    """Another choice on one rank of one replica."""
    return choices[dist.get_rank() == 3]


DIVIDED = "ClusterError: gradients of FSDP unit '<root>' must be divided by the number of shards before the "
CHANGED = "ClusterError: modules and parameters of a model must stay what they were when it was attached"

# What is done, and how the error begins.
CASES: dict[str, tuple[Act, str]] = {
    "a mesh of two dimensions": (
        lambda: attach(sharded(grid(2, 2))),
        "ClusterError: mesh of parameter 'first.weight' must have 1 dimension, the shard axis, got 2: ",
    ),
    "a group for DDP": (
        lambda: attach(DistributedDataParallel(make_net())),
        "ArgumentError: process_group must be None for a model in DistributedDataParallel",
    ),
    "no group": (
        lambda: attach(process_group=None),
        "ArgumentError: process_group must be the process group or mesh of the replicate axis for a sharded "
        "model, got None: pass mesh['replicate']",
    ),
    "the whole mesh as a group": (
        lambda: attach(process_group=grid(2, 2)),
        "ArgumentError: process_group must be a process group or a mesh of 1 dimension, got one of 2: ",
    ),
    "all ranks as a group": (
        lambda: attach(process_group=dist.group.WORLD),
        "ClusterError: the replicate group must share one rank with the shard group, this one, got ranks "
        "[0, 1, 2, 3] beside shards on ranks {shards}: ",
    ),
    "replicas of different parts": (
        lambda: attach(process_group=crossed()),
        "ClusterError: all ranks must have the same shard, got {places}",
    ),
    "twice": (
        twice,
        "ClusterError: attach must be called once for a model: FSDP unit '<root>' has an all-reduce hook ",
    ),
    "sharded by columns": (
        lambda: attach(by_columns()),
        "ClusterError: placement of parameter '0.weight' must be Shard(0) or Replicate(), got Shard(dim=1)",
    ),
    "a part that is not sharded": (
        lambda: attach(partly_plain()),
        "ClusterError: parameter 'extra.weight' must be sharded as the others are, got a plain tensor: ",
    ),
    "two meshes": (
        lambda: attach(on_two_meshes()),
        "ClusterError: parameters must be on one mesh, got '0.weight' on ranks {replicas} and '1.weight' on "
        "ranks {shards}",
    ),
    "several parameter groups": (
        lambda: attach(with_groups()),
        "ClusterError: FSDP unit 'extra' must have one parameter group: ",
    ),
    "parameters in the CPU's memory": (
        lambda: attach(sharded(grid(2, 2)["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))),
        "ClusterError: offload_policy of FSDP unit '<root>' must not be CPUOffloadPolicy",
    ),
    "gradients that are divided after the hook": (
        lambda: regtopk.attach(
            sharded(grid(1, 4)["shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)),
            TOPK,
            process_group=grid(1, 4)["replicate"],
        ),
        f"{DIVIDED}all-reduce hook: reduce_dtype must be float32 or bfloat16, got torch.float16",
    ),
    "a factor that is divided by after the hook": (lambda: attach(divided_by_eight()), DIVIDED),
    "sums in the place of means": (lambda: attach(summing()), DIVIDED),
    "sums in the place of means, later": (summing_later, DIVIDED),
    "after UpdateExchange": (after_updates, "ClusterError: model must have no UpdateExchange, got one"),
    "skip": (
        lambda: attach(skip=max),
        "ArgumentError: skip must be None for a fully_shard'ed model, whose units are exchanged whole, got <",
    ),
    "k": (
        lambda: attach(algorithm=regtopk.TopK(k=3)),
        "ArgumentError: k must be None for a model that is exchanged in parts (FSDP units, fragments), which "
        "differ in size, got 3: give a density",
    ),
    "replicas differ": (
        lambda: attach(algorithm=by_replica(TOPK, regtopk.Dense())),
        "ClusterError: all ranks must have the same algorithm, got 'topk' on rank {replicas[0]}, 'dense' on ",
    ),
    "algorithms of parts differ": (
        lambda: attach(algorithm=by_part(TOPK, regtopk.Dense())),
        "ClusterError: all ranks that share a model must have the same algorithm, got 'topk' on rank 2, "
        "'dense' on rank 3 (replica 1)",
    ),
    "parts of a replica differ": (
        lambda: attach(dense_steps=by_part(0, 2)),
        "ClusterError: all ranks that share a model must have the same dense_steps, got 0 on rank 2, 2 on ",
    ),
    "weights of parts differ": (
        lambda: attach(weight=by_part(0.5, 0.25)),
        "ClusterError: all ranks that share a model must have the same weight, got 0.5 on rank 2, 0.25 on ",
    ),
    "a model without memory": (
        lambda: attach(on_meta()),
        "ClusterError: parameter 'weight' must be on the device that trains it, got 'meta': ",
    ),
    "a module that comes later": (with_another_module, CHANGED),
    "a module in the place of another": (with_a_module_replaced, CHANGED),
    "a unit that is trained later": (
        unfrozen_later,
        "ClusterError: parameters of FSDP unit 'extra' must have required a gradient when it was attached",
    ),
    "replicas that begin apart": (
        beginning_apart,
        "ClusterError: parameters must be the same on all replicas before the first step, but 'last.bias' "
        "differs between ranks 1 and 3: ",
    ),
    "a unit that is used in part": (
        use_a_part,
        "ClusterError: gradient of FSDP unit '<root>' must have 1692 entries, of all its parameters that "
        "required a gradient when it was attached, got 872: ",
    ),
    "a backward inside another": (
        backward_inside_another,
        "ClusterError: activation checkpoints around FSDP units must be made with use_reentrant=False",
    ),
    "after close": (after_close, "ClusterError: the exchange must not be used after close()"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_on_every_rank(four_ranks: Ranks, case: str) -> None:
    for rank, found in enumerate(four_ranks.run(refusal_of, case)):
        first, second = [0, 3] if rank in (0, 3) else [1, 2]  # crossed
        start = CASES[case][1].format(
            shards=[0, 1] if rank < 2 else [2, 3],
            replicas=[0, 2] if rank % 2 == 0 else [1, 3],
            places=f"{[first % 2, 2]} on rank {first}, {[second % 2, 2]} on rank {second}",
        )
        assert found[: len(start)] == start


def refusal_of(case: str) -> str:
    return ": ".join(refusal(CASES[case][0]))


@on_ranks(4)
def test_nothing_is_changed_by_a_refusal() -> None:
    model = sharded(grid(2, 2)["shard"])
    refusal(lambda: attach(model, dense_steps=by_part(0, 2)))
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks = [group._all_reduce_hook for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    attach(model)  # and it can be mended
    assert hooks == [None] * 4


def test_a_missing_rank_is_found_by_all_others(four_ranks: Ranks) -> None:
    *found, absent = four_ranks.run(attach_on_three)
    assert absent is None and [kind for kind, _ in found] == ["ClusterError"] * 3
    replicas = (
        "did every rank call regtopk.attach along the replicate axis (one may still wait for another shard)?"
    )
    starts = [
        f"{replicas} rank 2 has not after 1 s",
        f"{replicas} rank 3 has not after 1 s",
        "did every rank call regtopk.attach along the shard axis? rank 3 has not after 1 s",
    ]
    for (_, message), start in zip(found, starts, strict=True):
        assert message.startswith(start)


def attach_on_three() -> tuple[str, str] | None:
    model = sharded(grid(2, 2)["shard"])
    found = None
    if dist.get_rank() != 3:
        found = refusal(lambda: attach(model, handshake_timeout_s=1))
    dist.barrier()
    attach(model)  # on all, again
    return found
