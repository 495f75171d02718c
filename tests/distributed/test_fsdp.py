"""Models of fully_shard, replicated over a slow axis: gradients are exchanged between equal parts."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import regtopk
from regtopk.core.algorithm import Algorithm
from regtopk.distributed.steps.agreement import Agreement
from regtopk.errors import ClusterError
from regtopk.lab.experiments.settings import threads_for
from regtopk.simulate import Cluster
from tests.distributed import test_updates, training
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.sharding import GRIDS, UNITS, attached, grid, sharded, used_twice, whole_parameters
from tests.distributed.test_updates import is_same_on_all_ranks

NUM_STEPS = 3
LR = 0.5


def train(model: nn.Module, steps: range = range(NUM_STEPS), **arguments: Any) -> Tensor:
    """The parameters after some steps."""
    test_updates.train(model, torch.optim.SGD(model.parameters(), lr=LR), steps, **arguments)
    return whole_parameters(model)


# Everything sent: what torch does by itself on a mesh of two dimensions.


@pytest.mark.parametrize("shape", GRIDS, ids=str)
@on_ranks(4)
def test_all_entries_equal_native_hsdp(shape: tuple[int, int]) -> None:
    mesh = grid(*shape)
    native = train(sharded(mesh))
    for algorithm in (regtopk.Dense(), regtopk.TopK(density=1)):
        model = sharded(mesh["shard"])
        regtopk.attach(model, algorithm, process_group=mesh["replicate"])
        attached = train(model)
        torch.testing.assert_close(attached, native)  # they add in another order
        assert is_same_on_all_ranks(attached)


def checkpointed() -> training.Net:
    net = training.make_net()
    checkpoint(net.extra)
    return net


def partly_frozen() -> training.Net:
    net = training.make_net()
    net.extra.requires_grad_(False)
    net.last.bias.requires_grad_(False)
    return net


def with_a_group(mesh: DeviceMesh) -> Any:
    net = training.make_net()
    fully_shard([net.first, net.extra], mesh=mesh)
    return fully_shard(net, mesh=mesh)


KINDS: dict[str, Callable[[DeviceMesh], Any]] = {
    "not resharded after forward": lambda mesh: sharded(mesh, reshard_after_forward=False),
    "activation checkpointing": lambda mesh: sharded(mesh, checkpointed()),
    "frozen parameters": lambda mesh: sharded(mesh, partly_frozen()),
    "one unit": lambda mesh: fully_shard(training.make_net(), mesh=mesh),
    "a group of modules": with_a_group,
    "a unit used twice": used_twice,
}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_kinds_of_models_equal_native_hsdp(kind: str) -> None:
    mesh = grid(2, 2)
    model, native = KINDS[kind](mesh["shard"]), KINDS[kind](mesh)
    exchange = regtopk.attach(model, regtopk.Dense(), process_group=mesh["replicate"])
    torch.testing.assert_close(train(model, range(2)), train(native, range(2)))
    assert exchange.num_steps == 2


# Some entries sent: the same as replicas that are not sharded, whose exchange is cut by hand.

ALGORITHMS: list[Algorithm[Any]] = [
    regtopk.TopK(density=0.05),
    regtopk.TopK(density=0.05, value_code="4bit"),
    regtopk.RegTopK(density=0.05),
    regtopk.DGC(density=0.05),
    regtopk.Consensus(density=0.05),
    regtopk.RandomK(density=0.05),
]


@pytest.mark.parametrize(
    ("shape", "algorithms"),
    [((2, 2), ALGORITHMS), ((4, 1), [ALGORITHMS[1], regtopk.Consensus(density=0.05)])],
)
def test_it_equals_replicas_that_exchange_in_the_same_parts(
    four_ranks: Ranks, shape: tuple[int, int], algorithms: list[Algorithm[Any]]
) -> None:
    waiting = four_ranks.start(train_attached, shape, algorithms)
    with threads_for(1):  # as the ranks have
        by_hand = [train_by_hand(algorithm, *shape) for algorithm in algorithms]
    for results in four_ranks.wait_for(waiting):
        for algorithm, found, expected in zip(algorithms, results, by_hand, strict=True):
            assert torch.equal(found, expected), algorithm


def train_attached(shape: tuple[int, int], algorithms: list[Algorithm[Any]]) -> list[Tensor]:
    mesh = grid(*shape)
    results = []
    for algorithm in algorithms:
        model = sharded(mesh["shard"])
        regtopk.attach(model, algorithm, process_group=mesh["replicate"].get_group())
        results.append(train(model))
    return results


def train_by_hand(algorithm: Algorithm[Any], replicas: int, shards: int) -> Tensor:
    """One process computes what all ranks do: a simulated exchange for every part of every unit."""
    net = training.make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    units = [list(part.parameters()) for part in (net.first, net.extra, net.middle, net.last)]
    clusters = [[Cluster(algorithm, num_workers=replicas) for _ in range(shards)] for _ in units]
    for step in range(NUM_STEPS):
        grads = torch.stack([mean_of_replica(net, step, replica, shards) for replica in range(replicas)])
        sizes = [p.numel() for p in net.parameters()]
        by_parameter = dict(zip(net.parameters(), grads.split(sizes, 1), strict=True))
        for parameters, of_unit in zip(units, clusters, strict=True):
            padded = [padded_parts(by_parameter[p], p, shards) for p in parameters]
            pieces = []
            for part, cluster in enumerate(of_unit):
                piece = cluster.step(torch.cat([parts[:, part] for parts in padded], 1))
                pieces.append(piece.split([parts.shape[2] for parts in padded]))
            for p, *parts in zip(parameters, *pieces, strict=True):
                p.grad = torch.cat(parts)[: p.numel()].view_as(p)
        optimizer.step()
    return training.flat_parameters(net)


def mean_of_replica(net: nn.Module, step: int, replica: int, shards: int) -> Tensor:
    """The mean gradient of the ranks that share a replica, as one vector."""
    total = torch.zeros(())
    for rank in range(replica * shards, (replica + 1) * shards):
        net.zero_grad()
        net(training.batch(step, rank)).square().mean().backward()
        total = total + training.flat_gradients(net)
    return total / shards


def padded_parts(grads: Tensor, p: Tensor, shards: int) -> Tensor:
    """(replicas, numel) cut along the parameter's rows, the last parts filled up: (replicas, shards, m)."""
    m = -(-p.shape[0] // shards) * p.shape[1:].numel()
    padded = torch.zeros(len(grads), shards * m)
    padded[:, : p.numel()] = grads
    return padded.view(len(grads), shards, m)


# What a step is.


@on_ranks(4)
def test_accumulation_is_one_step_of_the_sum() -> None:
    (model, exchange), (other, _) = (attached(regtopk.TopK(density=0.2)) for _ in range(2))
    model.set_requires_gradient_sync(False)
    training.loss_of(model, 0).backward()
    assert exchange.num_steps == 0 and exchange.total.sent_bytes == 0
    model.set_requires_gradient_sync(True)
    training.loss_of(model, 1).backward()
    (training.loss_of(other, 0) + training.loss_of(other, 1)).backward()
    torch.testing.assert_close(training.flat_gradients(model), training.flat_gradients(other))
    assert exchange.num_steps == 1


@on_ranks(4)
def test_a_unit_that_is_not_used_sends_nothing_and_keeps_its_residual() -> None:
    model, exchange = attached(regtopk.RegTopK(density=0.05))
    place = str(exchange.rank)
    training.loss_of(model, 0).backward()
    with_extra, before = exchange.last_step.num_entries, exchange.state_dict()
    training.loss_of(model, 1, with_extra=False).backward()
    after = exchange.state_dict()
    assert exchange.num_steps == 2
    parts = [part for saved in (before, after) for part in saved["shards"].values()]
    entries = [part["workers"][place]["entries"] for part in parts]
    assert exchange.last_step.num_entries < with_extra
    for name in UNITS:
        assert (name == "extra") == training.same(entries[0][name], entries[1][name])
        assert entries[0][name]["residual"].any()


@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(4)
def test_a_unit_that_arrives_twice_in_a_backward(set_to_none: bool) -> None:
    """Gradients of two steps whose unit "middle" arrives once more, with one more in every entry."""
    (model, exchange), native = attached(regtopk.Dense()), sharded(grid(2, 2))

    def hook(flat: Tensor) -> None:
        again = torch.ones_like(flat)
        exchange._on_gradient("middle", flat)
        exchange._on_gradient("middle", again)
        assert not again.any()

    model.middle.set_all_reduce_hook(hook)
    for step in range(2):
        for net in (model, native):
            net.zero_grad(set_to_none)
            training.loss_of(net, step).backward()
    for p in native.middle.parameters():
        p.grad.to_local().add_(1.0)
    torch.testing.assert_close(training.flat_gradients(model), training.flat_gradients(native))


@on_ranks(4)
def test_hooks_of_users_on_gradients() -> None:
    (model, _), native = attached(regtopk.Dense()), sharded(grid(2, 2))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", 2 * p.grad))
    for net in (model, native):
        training.loss_of(net, 0).backward()
    other, _ = attached(regtopk.Dense())
    other.middle.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    # they come before the exchange, and see zeros
    torch.testing.assert_close(training.flat_gradients(model), training.flat_gradients(native))
    assert training.refusal(training.loss_of(other, 0).backward) == (
        "ClusterError",
        "gradients of FSDP unit 'middle' must stay until backward is over",
    )


POLICIES: dict[str, tuple[MixedPrecisionPolicy, torch.dtype]] = {
    "float32": (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), torch.float32),
    "bfloat16": (MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.bfloat16),
}


@pytest.mark.parametrize("reduce_dtype", POLICIES)
@on_ranks(4)
def test_mixed_precision_equals_native_hsdp(reduce_dtype: str) -> None:
    mesh = grid(2, 2)
    policy, dtype = POLICIES[reduce_dtype]
    model, native = sharded(mesh["shard"], mp_policy=policy), sharded(mesh, mp_policy=policy)
    exchange: Any = regtopk.attach(model, regtopk.TopK(density=1), process_group=mesh["replicate"])
    assert all(p.dtype == dtype for p in exchange._steps.parameters.named.values())
    for each in (model, native):
        training.loss_of(each, 0).backward()
    ((_, saved),) = exchange.state_dict()["shards"].items()
    state = saved["workers"][str(exchange.rank)]["entries"]["extra"]
    assert state["residual"].dtype == torch.float32
    attached, expected = training.flat_gradients(model), training.flat_gradients(native)
    if reduce_dtype == "float32":
        torch.testing.assert_close(attached, expected)
    else:  # native rounds the sum to bfloat16, and the mean of two is exact otherwise
        assert (attached - expected).norm() < 2**-8 * expected.norm()


@on_ranks(4)
def test_detached_it_is_native_hsdp() -> None:
    (model, exchange), native = attached(regtopk.TopK(density=0.05)), sharded(grid(2, 2))
    training.loss_of(model, 0).backward()
    exchange.detach()
    model.zero_grad()
    for each in (model, native):
        training.loss_of(each, 1).backward()
    assert torch.equal(training.flat_gradients(model), training.flat_gradients(native))
    assert exchange.summary().endswith("the dense steps since are not counted here")
    regtopk.attach(model, regtopk.TopK(density=0.05), process_group=grid(2, 2)["replicate"])  # again


@on_ranks(4)
def test_one_replica_sends_nothing_and_says_so() -> None:
    mesh = grid(1, 4)
    model = sharded(mesh["shard"])
    with training.listening() as said:
        exchange = regtopk.attach(model, regtopk.TopK(density=0.05), process_group=mesh["replicate"])
        train(model, range(2))
    assert said == ["there is one replica: its gradients are sparsified, but nothing is sent"]
    assert exchange.total.sent_bytes == 0 and exchange.total.num_entries > 0 and exchange.num_steps == 2


@on_ranks(4)
def test_gradients_are_zero_where_an_exchange_failed() -> None:
    model, exchange = attached(regtopk.TopK(density=0.1))
    with patch.object(Agreement, "hear", side_effect=ClusterError("ranks differ")):
        found = training.refusal(training.loss_of(model, 0).backward)
    is_cleared = not training.flat_gradients(model).any()
    model.zero_grad()
    training.loss_of(model, 1).backward()
    assert found == ("ClusterError", "ranks differ") and is_cleared and exchange.num_steps == 1
