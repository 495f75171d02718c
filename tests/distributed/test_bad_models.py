"""Models and parameters that cannot be exchanged: refused by name, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk.errors import ClusterError
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.training import closing, ddp, flat_gradients, loss_of, make_net, refusal

TOPK = regtopk.TopK(density=0.1)

PARAMETERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "another shape": (
        lambda: nn.Linear(5, 3),
        "('weight', (2, 3), 'torch.float32') on rank 0, ('weight', (3, 5), 'torch.float32') on rank 1",
    ),
    "another name": (
        lambda: nn.Sequential(nn.Linear(3, 2)),
        "('weight', (2, 3), 'torch.float32') on rank 0, ('0.weight', (2, 3), 'torch.float32') on rank 1",
    ),
    "another dtype": (
        lambda: nn.Linear(3, 2, dtype=torch.float64),
        "('weight', (2, 3), 'torch.float32') on rank 0, ('weight', (2, 3), 'torch.float64') on rank 1",
    ),
    "another number": (lambda: nn.Linear(3, 2, bias=False), "2 parameters on rank 0, 1 on rank 1"),
}


@pytest.mark.parametrize("case", PARAMETERS)
@on_ranks(2)
def test_models_that_differ(case: str) -> None:
    net = nn.Linear(3, 2) if dist.get_rank() == 0 else PARAMETERS[case][0]()
    expected = f"all ranks must have the same parameters, got {PARAMETERS[case][1]}"
    assert refusal(lambda: regtopk.Exchange(net, TOPK)) == ("ClusterError", expected)


# Models and parameters that cannot be exchanged.


def sharded() -> nn.Module:
    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


def sharded_in_place() -> nn.Module:
    net = nn.Linear(4, 4)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    return net


def holding_a_dtensor() -> nn.Module:
    net = nn.Linear(4, 4)
    net.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), init_device_mesh("cpu", (2,))))
    return net


def holding_a_complex() -> nn.Module:
    net = nn.Module()
    net.z = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    return net


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "attach to no DDP": (
        lambda: regtopk.attach(make_net(), TOPK),
        "ClusterError: model must be a DistributedDataParallel, got Net: wrap it first, or use "
        "regtopk.Exchange",
    ),
    "attach to no module": (
        lambda: regtopk.attach("net", TOPK),  # type: ignore[arg-type]
        "ClusterError: model must be a DistributedDataParallel, got str: ",
    ),
    "attach to FSDP": (
        lambda: regtopk.attach(sharded(), TOPK),
        "ClusterError: model must be a DistributedDataParallel, got FullyShardedDataParallel: ",
    ),
    "state for FSDP2": (
        lambda: regtopk.SparseHookState(sharded_in_place(), TOPK),
        "ClusterError: model must be a DistributedDataParallel, got FSDPLinear: ",
    ),
    "FSDP": (
        lambda: regtopk.Exchange(sharded(), TOPK),
        "ClusterError: the model is FullyShardedDataParallel: FSDP shards its gradients, which is not ",
    ),
    "FSDP2": (lambda: regtopk.Exchange(sharded_in_place(), TOPK), "ClusterError: the model is FSDPLinear: "),
    "DTensor": (
        lambda: regtopk.Exchange(holding_a_dtensor(), TOPK),
        "ClusterError: parameter 'weight' is a DTensor: sharded parameters are not supported",
    ),
    "sparse embedding": (
        lambda: regtopk.attach(DistributedDataParallel(nn.Embedding(5, 3, sparse=True)), TOPK),
        "ClusterError: the model is Embedding with sparse=True: sparse-layout gradients are not supported",
    ),
    "DDP without attach": (
        lambda: regtopk.Exchange(ddp(), TOPK),
        "ClusterError: module must not be wrapped in DistributedDataParallel: use regtopk.attach for that",
    ),
    "complex": (
        lambda: regtopk.Exchange(holding_a_complex(), TOPK),
        "ClusterError: parameter 'z' must be real, got torch.complex64",
    ),
    "float8": (
        lambda: regtopk.Exchange([("q", nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn)))], TOPK),
        "ClusterError: parameter 'q' must have a dtype of 16 bits or more, got torch.float8_e4m3fn",
    ),
    "two devices": (
        lambda: regtopk.Exchange(on_two_devices(), TOPK),
        "ClusterError: parameters must be on one device, got ['cpu', 'meta']",
    ),
    "too large for raw32": (
        lambda: regtopk.Exchange(nn.Linear(2**16, 2**16, device="meta"), TOPK, index_code="raw32"),
        "ArgumentError: numel must be in 0..4294967296 with index_code 'raw32', got 4295032832",
    ),
    "nothing to train": (
        lambda: regtopk.Exchange(make_net().requires_grad_(False), TOPK),
        "ArgumentError: parameters must hold at least one that requires a gradient, got none",
    ),
    "no parameters": (
        lambda: regtopk.Exchange(["first.weight"], TOPK),  # type: ignore[arg-type]
        "ArgumentError: parameters must be a module, parameters or (name, parameter) pairs, got str",
    ),
    "a name twice": (
        lambda: regtopk.Exchange([*make_net().named_parameters(), *make_net().named_parameters()], TOPK),
        "ArgumentError: parameters must be given once each, got 'first.weight' again",
    ),
    "a parameter twice": (
        lambda: regtopk.Exchange([("a", p := nn.Parameter(torch.zeros(2))), ("b", p)], TOPK),
        "ArgumentError: parameters must be given once each, got 'b' again",
    ),
}


@pytest.mark.parametrize("case", MODELS)
@on_ranks(2)
def test_models(case: str) -> None:
    found = ": ".join(refusal(MODELS[case][0]))
    assert found.startswith(MODELS[case][1])


@on_ranks(2)
def test_attached_twice() -> None:
    model = ddp()
    with closing(regtopk.attach(model, TOPK)) as exchange:
        refused = refusal(lambda: regtopk.attach(model, TOPK))
        loss_of(model, 0).backward()  # the first still works
        assert exchange.num_steps == 1
    assert refused[1].startswith(
        "attach must be called once, for a model without another communication hook (after detach(), wrap "
        "the network in a new DistributedDataParallel): "
    )


@on_ranks(2)
def test_another_hook() -> None:
    model = ddp()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    refused = refusal(lambda: regtopk.attach(model, TOPK))
    loss_of(model, 0).backward()  # the other hook still works
    assert flat_gradients(model).count_nonzero() == 3363
    assert refused[0] == "ClusterError" and "another communication hook" in refused[1]


@on_ranks(2)
def test_joining_early() -> None:
    model = ddp()
    exchange = regtopk.attach(model, TOPK)
    with pytest.raises(ClusterError, match=r"^the model must not be used within torch's Join"), Join([model]):
        loss_of(model, 0)
    assert exchange.num_steps == 0


def test_ranks_outside_the_group(two_ranks: Ranks) -> None:
    inside, outside = two_ranks.run(exchange_in_a_group_of_rank_0)
    assert inside == ("fine", "")
    assert outside[0] == "ClusterError"
    assert outside[1].startswith("this rank must be in the process group, got ")
    assert outside[1].endswith(" on rank 1")


def exchange_in_a_group_of_rank_0() -> tuple[str, str]:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        return refusal(lambda: regtopk.Exchange(make_net(), TOPK, process_group=group))
    regtopk.Exchange(make_net(), TOPK, process_group=group)
    return "fine", ""


def test_no_process_group() -> None:
    with pytest.raises(
        ClusterError, match=r"^torch.distributed must be initialised first: call init_process"
    ):
        regtopk.Exchange(make_net(), TOPK)
