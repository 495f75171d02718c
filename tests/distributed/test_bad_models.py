"""Models that cannot be exchanged, or change afterwards: refused by name, and nothing is lost."""

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
from tests.distributed import training
from tests.distributed.ranks import on_ranks

TOPK = regtopk.TopK(density=0.1)

PARAMETERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "shape": (lambda: nn.Linear(5, 3), "('weight', (3, 5), 'torch.float32')"),
    "name": (lambda: nn.Sequential(nn.Linear(3, 2)), "('0.weight', (2, 3), 'torch.float32')"),
    "dtype": (lambda: nn.Linear(3, 2, dtype=torch.float64), "('weight', (2, 3), 'torch.float64')"),
    "number": (lambda: nn.Linear(3, 2, bias=False), "None"),
}


@pytest.mark.parametrize("case", PARAMETERS)
@on_ranks(2)
def test_models_that_differ(case: str) -> None:
    make, theirs = PARAMETERS[case]
    net = nn.Linear(3, 2) if dist.get_rank() == 0 else make()
    mine = "('bias', (2,), 'torch.float32')" if case == "number" else "('weight', (2, 3), 'torch.float32')"
    text = f"all ranks must have the same parameters, got {mine} on rank 0, {theirs} on rank 1"
    assert training.refusal(lambda: regtopk.Exchange(net, TOPK)) == ("ClusterError", text)


def sharded_in_place() -> nn.Module:
    net = nn.Linear(4, 4)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    return net


def sharded() -> nn.Module:
    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))


def parameter(tensor: Any) -> list[tuple[str, nn.Parameter]]:
    return [("p", nn.Parameter(tensor))]


def on_a_mesh() -> list[tuple[str, nn.Parameter]]:
    return parameter(distribute_tensor(torch.zeros(4, 4), init_device_mesh("cpu", (2,))))


def twice() -> list[tuple[str, nn.Parameter]]:
    return [*training.make_net().named_parameters(), *training.make_net().named_parameters()]


P_OF_2 = nn.Parameter(torch.zeros(2))
EMBEDDINGS = nn.Sequential(nn.Linear(2, 2), nn.Embedding(5, 3, sparse=True))
PARTLY_META = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
META = "must be on the device that trains it, got 'meta': call to_empty() and give it values first"
NARROW = torch.zeros(3).to(torch.float8_e4m3fn)
DDP, DENSE = "DistributedDataParallel", "sparse=False"
NO_DDP = f"ClusterError: model must be a {DDP}, got"
FIRST = "wrap it first, or use regtopk.Exchange; or shard it by fully_shard (FSDP2)"
NO_GRADIENT = "at least one that requires a gradient, got none"
UNSHARDED, FSDP = "ClusterError: the model must not be sharded by FSDP, got", "regtopk.attach for fully_shard"
ALL = "hand over the whole model, sharded by fully_shard (FSDP2), to regtopk.attach or regtopk.UpdateExchange"
C, P, GIVEN = "ClusterError:", "ClusterError: parameter 'p' must", "ArgumentError: parameters must"
MODELS: list[tuple[str, Callable[[], Any], str]] = [
    ("attach", training.make_net, f"{NO_DDP} Net: {FIRST}"),
    ("attach", lambda: "net", f"{NO_DDP} str: {FIRST}"),
    ("attach", sharded, f"{NO_DDP} FullyShardedDataParallel: {FIRST}"),
    ("SparseHookState", sharded_in_place, f"{NO_DDP} FSDPLinear: {FIRST}"),
    ("Exchange", sharded, f"{UNSHARDED} FullyShardedDataParallel: use {FSDP} (FSDP2)"),
    ("Exchange", sharded_in_place, f"{UNSHARDED} FSDPLinear: use {FSDP} (FSDP2)"),
    ("Exchange", on_a_mesh, f"{P} be a plain tensor, got a DTensor: {ALL}"),
    ("Exchange", lambda: EMBEDDINGS, f"{C} module '1' must have {DENSE}, got Embedding with sparse=True"),
    ("Exchange", training.ddp, f"{C} module must not be in {DDP}: use regtopk.attach for that"),
    ("Exchange", lambda: parameter(torch.zeros(3) + 0j), f"{P} be real, got torch.complex64"),
    ("Exchange", lambda: parameter(NARROW), f"{P} have a dtype of 16 bits or more, got {NARROW.dtype}"),
    ("Exchange", lambda: training.make_net().requires_grad_(False), f"{GIVEN} hold {NO_GRADIENT}"),
    ("Exchange", lambda: [nn.Parameter(torch.arange(3), requires_grad=False)], f"{GIVEN} hold {NO_GRADIENT}"),
    ("Exchange", lambda: ["p"], f"{GIVEN} be a module, parameters or (name, parameter) pairs, got str"),
    ("Exchange", object, f"{GIVEN} be a module, parameters or (name, parameter) pairs, got object"),
    ("Exchange", twice, f"{GIVEN} be given once each, got 'first.weight' again"),
    ("Exchange", lambda: [("a", P_OF_2), ("b", P_OF_2)], f"{GIVEN} be given once each, got 'b' again"),
    ("Exchange", lambda: nn.Linear(2, 2, device="meta"), f"{C} parameter 'weight' {META}"),
    ("Exchange", lambda: PARTLY_META, f"{C} parameters must be on one device, got ['cpu', 'meta']"),
]


@pytest.mark.parametrize("case", range(len(MODELS)), ids=lambda case: MODELS[case][2])
@on_ranks(2)
def test_models(case: int) -> None:
    call, make, text = MODELS[case]
    assert ": ".join(training.refusal(lambda: getattr(regtopk, call)(make(), TOPK))) == text


@on_ranks(2)
def test_a_model_too_large_for_raw32() -> None:
    net = nn.Linear(2**16, 2**16, device="meta")
    refused = training.refusal(lambda: regtopk.Exchange(net, TOPK, index_code="raw32"))
    text = "numel must be in 0..4294967296 with index_code 'raw32', got 4295032832"
    assert refused == ("ArgumentError", text)


@on_ranks(2)
def test_attached_twice_or_beside_another_hook() -> None:
    model = training.ddp()
    with training.closing(regtopk.attach(model, TOPK)) as exchange:
        refused = training.refusal(lambda: regtopk.attach(model, TOPK))
        training.loss_of(model, 0).backward()  # the first still works
        assert exchange.num_steps == 1
    model = training.ddp()
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    text = (
        "attach must be called once, for a model without another communication hook (after detach(), wrap "
        "the network in a new DistributedDataParallel): "
    )
    for kind, said in (refused, training.refusal(lambda: regtopk.attach(model, TOPK))):
        assert kind == "ClusterError" and said.startswith(text)  # then torch's own words
    training.loss_of(model, 0).backward()  # the other hook still works
    assert training.flat_gradients(model).count_nonzero() == 3363


@on_ranks(2)
def test_joining_early() -> None:
    model = training.ddp()
    exchange = regtopk.attach(model, TOPK)
    with pytest.raises(ClusterError) as refused, Join([model]):
        training.loss_of(model, 0)
    assert exchange.num_steps == 0
    assert str(refused.value) == (
        "the model must not be used within torch's Join: a rank without inputs answers DDP's own "
        "collectives, not these; give all ranks as many batches"
    )


@on_ranks(2)
def test_ranks_outside_the_group() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        regtopk.Exchange(training.make_net(), TOPK, process_group=group)
        return
    refused = training.refusal(lambda: regtopk.Exchange(training.make_net(), TOPK, process_group=group))
    text = f"this rank must be in the process group, got {group} on rank 1"
    assert refused == ("ClusterError", text)


def test_no_process_group() -> None:
    text = r"^torch.distributed must be initialised first: call init_process_group\(\)$"
    with pytest.raises(ClusterError, match=text):
        regtopk.Exchange(training.make_net(), TOPK)


# What must not change once an exchange is made.


def change(net: Any, case: str) -> None:
    if case == "added":
        net.more = nn.Linear(2, 2)
    elif case == "reshaped":
        net.last.bias.data = torch.zeros(1)
    elif case == "replaced":
        net.last.bias = nn.Parameter(torch.zeros(3))
    else:
        {"unfrozen": net.first, "frozen": net.last}[case].bias.requires_grad_(case == "unfrozen")


THERE = "must have been there, requiring a gradient, when the exchange was made: make a new one (for DDP: "
THERE += "wrap the model anew)"
CHANGES = {
    "added": f"parameter 'more.weight' of shape (2, 2) {THERE}",
    "reshaped": "parameter 'last.bias' must keep its shape (3,), got (1,)",
    "replaced": f"parameter 'last.bias' of shape (3,) {THERE}",
    "unfrozen": f"parameter 'first.bias' of shape (40,) {THERE}",
    "frozen": "parameter 'last.bias' must keep requiring a gradient: to freeze it, make a new exchange",
}


@pytest.mark.parametrize("is_ddp", [False, True])
@pytest.mark.parametrize("case", CHANGES)
@on_ranks(2)
def test_parameters_that_change(case: str, is_ddp: bool) -> None:
    net = training.make_net()
    net.first.bias.requires_grad_(False)
    model = DistributedDataParallel(net, find_unused_parameters=True) if is_ddp else net
    with training.closing((regtopk.attach if is_ddp else regtopk.Exchange)(model, TOPK)) as exchange:

        def make_step(number: int) -> None:
            training.loss_of(model, number).backward()
            if not is_ddp:
                exchange.step()

        make_step(0)
        before = training.algorithm_state(exchange)
        model.zero_grad()
        change(net, case)
        assert training.refusal(lambda: make_step(1)) == ("ClusterError", CHANGES[case])
        assert training.same(training.algorithm_state(exchange), before)


@on_ranks(2)
def test_sparse_gradients() -> None:
    net = nn.Embedding(5, 3)
    exchange = regtopk.Exchange(net, TOPK)
    at, values = torch.tensor([[1]]), torch.ones(1, 3)
    net.weight.grad = torch.sparse_coo_tensor(at, values, (5, 3), check_invariants=True)
    text = "gradient of 'weight' has a sparse layout, which is not supported"
    assert training.refusal(exchange.step) == ("ClusterError", text) and net.weight.grad.is_sparse


@on_ranks(2)
def test_ranks_at_different_steps() -> None:
    net = training.make_net()
    exchange = regtopk.Exchange(net, TOPK)
    saved = []
    for step in range(2):
        training.loss_of(net, step).backward()
        exchange.step()
        saved.append(exchange.state_dict())
    exchange.load_state_dict(saved[1 - dist.get_rank()])
    refused = training.refusal(exchange.step)
    exchange.load_state_dict(saved[0])
    exchange.step()  # nothing was lost: with the right file it goes on
    rule = "all ranks must exchange the same parameters at the same step"
    assert refused == ("ClusterError", f"{rule}, got step 2 on rank 0, step 1 on rank 1")


def density_of_this_rank(step: int) -> float:
    return 0.1 * (1 + dist.get_rank())


@on_ranks(2)
def test_ranks_that_select_different_numbers() -> None:
    net = training.make_net()
    exchange = regtopk.Exchange(net, regtopk.TopK(density=density_of_this_rank))
    training.loss_of(net, 0).backward()
    before = training.algorithm_state(exchange)
    refused = training.refusal(exchange.step)
    assert training.same(training.algorithm_state(exchange), before)
    rule = "all ranks must select equally many entries of every bucket"
    own = [336, 673][dist.get_rank()]
    text = f"{rule}, got 336 on rank 0, 673 on rank 1 in all; this rank [{own}]"
    assert refused == ("ClusterError", text)
