"""What `attach` refuses of sharded models, before anything has changed."""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import regtopk
from tests.distributed.ranks import on_ranks
from tests.distributed.sharding import grid, replica, sharded
from tests.distributed.test_updates_refused import IN_PARTS
from tests.distributed.training import closing, loss_of, make_net, refusal

TOPK = regtopk.TopK(density=0.1)
HALF = MixedPrecisionPolicy(reduce_dtype=torch.float16)


def attach(model: Any = None, algorithm: Any = TOPK, **options: Any) -> Any:
    options = {"process_group": grid(2, 2)["replicate"], **options}
    return regtopk.attach(net() if model is None else model, algorithm, **options)


def net(**options: Any) -> Any:
    return sharded(grid(2, 2)["shard"], **options)


def after_updates() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with closing(regtopk.UpdateExchange(model, optimizer, TOPK, process_group=grid(2, 2)["replicate"])):
        attach(model)


def twice() -> None:
    model = net()
    attach(model)
    attach(model)


def by_columns() -> Any:
    model = nn.Sequential(nn.Linear(4, 4))
    return fully_shard(model, mesh=grid(2, 2)["shard"], shard_placement_fn=lambda p: Shard(p.ndim - 1))


def partly_replicated() -> Any:
    model, mesh = net(), grid(2, 2)["shard"]
    model.scale = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    return model


def partly_plain() -> Any:
    model = make_net()
    fully_shard(model.first, mesh=grid(2, 2)["shard"])
    return model


def on_two_meshes() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=grid(2, 2)["replicate"])
    return fully_shard(model, mesh=grid(2, 2)["shard"])


def with_groups() -> Any:
    """A stand-in: torch makes such units for parameters on meshes of their own."""
    model = net()
    state = model.extra._get_fsdp_state()
    state._fsdp_param_groups = state._fsdp_param_groups * 2
    return model


def summing(model: Any) -> Any:
    model.set_force_sum_reduction_for_comms(True)
    return model


def divided_by_eight() -> Any:
    model = net(mp_policy=HALF)
    model.set_gradient_divide_factor(8.0)
    return model


def on_meta() -> Any:
    with torch.device("meta"):
        return fully_shard(nn.Linear(4, 4), mesh=grid(2, 2)["shard"])


def then(change: Callable[[Any], Any], num_before: int = 1) -> None:
    """Change a model when it is attached and has made some steps, and train on."""
    model = net()
    model.extra.requires_grad_(change is not unfreeze)
    attach(model)
    for step in range(num_before):
        loss_of(model, step).backward()
    change(model)
    loss_of(model, 1).backward()


def add_a_module(model: Any) -> None:
    model.later = fully_shard(nn.Linear(4, 4), mesh=grid(2, 2)["shard"])


def replace_a_module(model: Any) -> None:
    model.extra = fully_shard(make_net().extra, mesh=grid(2, 2)["shard"])


def unfreeze(model: Any) -> None:
    model.extra.requires_grad_(True)


def begin_apart(model: Any) -> None:
    if dist.get_rank() == 3:  # others that share its replica hear of it, too
        with torch.no_grad():
            model.last.bias.to_local().add_(1)


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
    mesh, model = grid(2, 2)["shard"], make_net()
    middle: Any = fully_shard(model.middle, mesh=mesh)
    model.middle = Reentrant(middle)  # type: ignore[assignment]
    attach(fully_shard(model, mesh=mesh))
    loss_of(model, 0).backward()


def after_close() -> None:
    model = net()
    attach(model).close()
    loss_of(model, 0).backward()


def crossed() -> Any:
    """Ranks 0 and 3, and 1 and 2: replicas of different parts."""
    groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    return groups[dist.get_rank() in (1, 2)]


def by_part(*choices: Any) -> Any:
    """Another choice on one rank of one replica."""
    return choices[dist.get_rank() == 3]


GROUP = "ArgumentError: process_group must be"
OF_MESH = "of mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', 'shard'))"
PASS = f"pass mesh['replicate'] {OF_MESH}"
DIVIDED = (
    "ClusterError: gradients of FSDP unit '<root>' must be divided by the number of shards before the "
    "all-reduce hook: reduce_dtype must be float32 or bfloat16, got {}, and "
    "set_force_sum_reduction_for_comms must not be used"
)
HALVES, SUMS = DIVIDED.format("torch.float16"), DIVIDED.format("torch.float32")
AGAIN = "call detach(), and attach again"
CHANGED = "ClusterError: modules and parameters of a model must stay what they were when it was attached: "
CHANGED += AGAIN
UNIT = (
    "ClusterError: gradient of FSDP unit {} must have {} entries, of all its parameters that required a "
    "gradient when it was attached, got {}: a backward must use all of a unit's parameters or none (torch's "
    "set_reduce_scatter_unused_params(True) fills in zeros); to unfreeze some, " + AGAIN
)

# The error, and what is done; one that ends with a colon goes on in torch's words.
TEXTS: dict[str, Callable[[], Any]] = {
    "ClusterError: mesh of parameter 'first.weight' must have 1 dimension, the shard axis, got 2: over a "
    "second one torch averages densely by itself; call fully_shard(..., mesh=mesh['shard']) "
    f"{OF_MESH}": lambda: attach(sharded(grid(2, 2))),
    f"{GROUP} the process group or mesh of the replicate axis for a sharded model, got None: "
    f"{PASS}": lambda: attach(process_group=None),
    f"{GROUP} a process group or a mesh of 1 dimension, got one of 2: {PASS}": lambda: attach(
        process_group=grid(2, 2)
    ),
    "ClusterError: the replicate group must share one rank with the shard group, this one, got ranks "
    f"[0, 1, 2, 3] beside shards on ranks {{shards}}: {PASS}": lambda: attach(process_group=dist.group.WORLD),
    "ClusterError: all ranks must have the same shard, got {places}": lambda: attach(process_group=crossed()),
    "ClusterError: FSDP unit '<root>' must have no all-reduce hook, got one: call detach() of what "
    "regtopk.attach gave": twice,
    "ClusterError: placement of parameter '0.weight' must be Shard(0) or Replicate(), "
    "got Shard(dim=1)": lambda: attach(by_columns()),
    "ClusterError: parameter 'scale' must be sharded by fully_shard along dimension 0, got a DTensor that is "
    "Replicate()": lambda: attach(partly_replicated()),
    "ClusterError: parameter 'extra.weight' must be sharded as the others are, got a plain tensor: call "
    "fully_shard on the whole model, too": lambda: attach(partly_plain()),
    "ClusterError: parameters must be on one mesh, got '0.weight' on ranks {replicas} and '1.weight' on "
    "ranks {shards}": lambda: attach(on_two_meshes()),
    "ClusterError: FSDP unit 'extra' must have one parameter group: ": lambda: attach(with_groups()),
    "ClusterError: offload_policy of FSDP unit '<root>' must not be CPUOffloadPolicy, whose gradients are "
    "not where its parameters are: exchange updates instead, by regtopk.UpdateExchange over a group with "
    "gloo for the CPU": lambda: attach(net(offload_policy=CPUOffloadPolicy(pin_memory=False))),
    "ClusterError: model must have no UpdateExchange, got one, and gradients would be exchanged beside "
    "updates: close() it first": after_updates,
    "ArgumentError: skip must be None for a fully_shard'ed model, whose units are exchanged whole, got "
    "<built-in function max>": lambda: attach(skip=max),
    IN_PARTS: lambda: attach(algorithm=regtopk.TopK(k=3)),
    "ClusterError: all ranks must have the same algorithm, got 'topk' on rank {replicas[0]}, 'dense' on "
    "rank {replicas[1]}": lambda: attach(algorithm=[TOPK, regtopk.Dense()][replica()]),
    "ClusterError: ranks that share a model must have the same weight, got 0.5 on rank 2, 0.25 on rank 3 "
    "(replica 1)": lambda: attach(weight=by_part(0.5, 0.25)),
    "ClusterError: parameter 'weight' must be on the device that trains it, got 'meta': call to_empty() and "
    "give it values first": lambda: attach(on_meta()),
    UNIT.format("'extra'", 0, 820): lambda: then(unfreeze),
    UNIT.format("'<root>'", 1692, 872): use_a_part,
    "ClusterError: all replicas must begin with the same parameters (seed them alike, or load the same "
    "weights), but a checksum differs: last.bias, got CHECKSUM on rank 1, CHECKSUM on rank "
    "3": lambda: then(begin_apart, num_before=0),
    "ClusterError: activation checkpoints around FSDP units must be made with use_reentrant=False, got one "
    "that runs a backward of its own (use_reentrant=True)": backward_inside_another,
    "ClusterError: the exchange must not be used after close()": after_close,
    HALVES: lambda: attach(divided_by_eight()),
    SUMS: lambda: attach(summing(net())),
    CHANGED: lambda: then(add_a_module),
}
CASES = [
    *((act, text) for text, act in TEXTS.items()),
    (
        lambda: attach(sharded(grid(1, 4)["shard"], mp_policy=HALF), process_group=grid(1, 4)["replicate"]),
        HALVES,
    ),
    (lambda: then(summing), SUMS),
    (lambda: then(replace_a_module, num_before=0), CHANGED),
]


@on_ranks(4)
def test_refused_on_every_rank() -> None:
    rank = dist.get_rank()
    first, second = [0, 3] if rank in (0, 3) else [1, 2]  # crossed
    facts = {
        "shards": [0, 1] if rank < 2 else [2, 3],
        "replicas": [0, 2] if rank % 2 == 0 else [1, 3],
        "places": f"{[first % 2, 2]} on rank {first}, {[second % 2, 2]} on rank {second}",
    }
    for act, text in CASES:
        found, expected = ": ".join(refusal(act)), text.format(**facts)
        found = re.sub(r"-?\d{6,}", "CHECKSUM", found)
        assert found == expected or (text.endswith(": ") and found.startswith(text)), found


@on_ranks(4)
def test_nothing_is_changed_by_a_refusal() -> None:
    model = net()
    refusal(lambda: attach(model, dense_steps=by_part(0, 2)))
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks = [group._all_reduce_hook for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    attach(model)  # and it can be mended
    assert hooks == [None] * 4


@on_ranks(4)
def test_a_missing_rank_is_found_by_all_others() -> None:
    model, rank = net(), dist.get_rank()
    if rank != 3:
        axis = "shard axis" if rank == 2 else "replicate axis (one may still wait for another shard)"
        kind, said = refusal(lambda: attach(model, handshake_timeout_s=3))
        start = (
            f"did every rank call regtopk.attach along the {axis}? rank {[2, 3, 3][rank]} has not after 3 s"
        )
        assert kind == "ClusterError" and said.startswith(start)
    dist.barrier()
    attach(model)  # on all, again
