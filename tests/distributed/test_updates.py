"""UpdateExchange: the optimizer runs first, and what it changed is exchanged."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import regtopk
from regtopk.simulate import Cluster
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.training import (
    batch,
    closing,
    flat_gradients,
    flat_parameters,
    listening,
    loss_of,
    make_net,
    same,
)

TOPK = regtopk.TopK(density=0.1)


def sgd(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def adamw(net: nn.Module, *, fused: bool = False) -> Optimizer:
    """With an epsilon that keeps the signs of tiny gradients from deciding anything."""
    return torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-3, fused=fused)


def nesterov(parameters: list[nn.Parameter], lr: float = 0.7) -> Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)


def train(net: nn.Module, optimizer: Optimizer, steps: range, **arguments: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step, **arguments).backward()
        optimizer.step()


@contextmanager
def updating(
    make: Any = sgd, algorithm: Any = TOPK, net: Any = None, **options: Any
) -> Iterator[tuple[Any, Any, Any]]:
    """A net, its optimizer, and their exchange, which is closed afterwards."""
    net = make_net() if net is None else net
    optimizer = make(net)
    with closing(regtopk.UpdateExchange(net, optimizer, algorithm, **options)) as exchange:
        yield net, optimizer, exchange


@on_ranks(2)
def test_weights_that_are_loaded_too_late_are_told_of() -> None:
    with listening() as said, updating(every=2) as (net, optimizer, exchange):
        weights = {name: tensor + 1 for name, tensor in net.state_dict().items()}
        train(net, optimizer, range(5))  # inside a round
        saved = exchange.state_dict()
        net.load_state_dict(weights)
        exchange.load_state_dict(saved)  # which loads all of it
        deepcopy(net).load_state_dict(weights)
        train(net, optimizer, range(5, 8))
        assert not said, said
        net.load_state_dict(weights)
        train(net, optimizer, range(8, 10))
        net.first.load_state_dict(net.first.state_dict())
        train(net, optimizer, range(10, 12))
    net.load_state_dict(weights)
    train(net, optimizer, range(12, 13))
    assert len(said) == 2 and all(text.startswith("the model has loaded weights after") for text in said)


def mean_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def is_same_on_all_ranks(tensor: Tensor) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensor)
    return all(torch.equal(tensor, other) for other in everyone)


@contextmanager
def exchanging(make: Any, algorithm: Any, net: Any = None, **options: Any) -> Iterator[tuple[Any, Any, Any]]:
    """The same; at the end all ranks have the same model."""
    with updating(make, algorithm, net, **options) as (net, optimizer, exchange):
        yield net, optimizer, exchange
        assert is_same_on_all_ranks(flat_parameters(net))


@on_ranks(4)
def test_dense_updates_of_sgd_are_ddp() -> None:
    ddp = DistributedDataParallel(make_net())
    train(ddp, sgd(ddp), range(5))
    for algorithm in (regtopk.Dense(), regtopk.TopK(density=1.0)):
        for deterministic in (True, False):
            with exchanging(sgd, algorithm, deterministic=deterministic) as (net, optimizer, exchange):
                train(net, optimizer, range(5))
                # an update is rounded to what parameters can tell apart: 5 roundings of numbers up to 0.3
                assert (flat_parameters(net) - flat_parameters(ddp)).abs().max() < 5 * 2**-24
                assert exchange.num_steps == exchange.num_rounds == 5


def test_ranks_and_the_simulator_agree_bit_for_bit(two_ranks: Ranks, four_ranks: Ranks) -> None:
    two_ranks.run(compare_with_simulator, [0.7, 0.3])
    four_ranks.run(compare_with_simulator, [0.5, 0.0, 0.2, 0.3])


def compare_with_simulator(weights: list[float]) -> None:
    for algorithm in (regtopk.Dense(), regtopk.RegTopK(density=0.05, value_code="4bit")):
        weight = weights[dist.get_rank()]
        with exchanging(adamw, algorithm, every=3, weight=weight) as (net, optimizer, exchange):
            train(net, optimizer, range(12))
            cluster = Cluster(algorithm, num_workers=len(weights), weights=weights)
            by_hand = train_by_hand([cluster], adamw, range(12), every=3)
            assert torch.equal(flat_parameters(net), by_hand), algorithm.name
            assert exchange.num_rounds == 4


def train_by_hand(
    clusters: list[Cluster], make: Any, steps: range, *, every: int, outer: Any = None
) -> Tensor:
    """One process does what all ranks do: a simulated exchange for each part that models are cut into."""
    shards, nets = len(clusters), [make_net() for _ in range(clusters[0].num_workers)]
    optimizers = [make(net) for net in nets]
    start = [nn.Parameter(p.detach().clone()) for p in nets[0].parameters()]
    step_outer = (outer(start) if outer else torch.optim.SGD(start, lr=1)).step
    for number in steps:
        for place, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            optimizer.zero_grad()
            for rank in range(place * shards, (place + 1) * shards):
                (net(batch(number, rank)).square().mean() / shards).backward()
            optimizer.step()
        if (number + 1) % every == 0:
            exchange_by_hand(nets, start, clusters)
            step_outer()
            with torch.no_grad():
                for net in nets:
                    torch._foreach_copy_(list(net.parameters()), list[Tensor](start))
    return nn.utils.parameters_to_vector(start).detach()


@torch.no_grad()
def exchange_by_hand(nets: list[Any], start: list[nn.Parameter], clusters: list[Cluster]) -> None:
    """The gradients of theta_start become the aggregate, part by part."""
    updates = [[begin - now for begin, now in zip(start, net.parameters(), strict=True)] for net in nets]
    for p in start:
        p.grad = torch.empty_like(p)
    for part, cluster in enumerate(clusters):
        rows = [torch.cat([cut(d, len(clusters))[part].flatten() for d in update]) for update in updates]
        aggregate = cluster.step(torch.stack(rows))
        targets = [cut(p.grad, len(clusters))[part] for p in start if p.grad is not None]
        for target, piece in zip(targets, aggregate.split([t.numel() for t in targets]), strict=True):
            target.copy_(piece.view_as(target))


def cut(tensor: Tensor, shards: int) -> list[Tensor]:
    """The parts of a parameter as fully_shard cuts it."""
    return list(tensor.split(-(-tensor.shape[0] // shards)))


@pytest.mark.parametrize("options", [{"every": 3}, {"every": 4, "fragments": 2}, {"every": 4, "delay": 2}])
@on_ranks(2)
def test_dense_bytes_are_those_of_the_steps_made(options: dict[str, Any]) -> None:
    with updating(adamw, **options) as (net, optimizer, exchange):
        for first, num_steps in ((0, 5), (5, 12), (12, 13)):
            train(net, optimizer, range(first, num_steps))
            exchange.finish()
            assert exchange.total.dense_bytes == num_steps * 4 * 3363  # two ranks send all of it
        summary, sent = exchange.summary(), exchange.total.sent_bytes
        assert f"topk: after 13 steps, {exchange.num_rounds} rounds on 2 workers;" in summary
        assert f"sent      {sent / 13:.3g} B per step" in summary and "dense     13.5 kB per step" in summary


@on_ranks(2)
def test_a_step_that_a_grad_scaler_skips_is_none() -> None:
    """Rank 1 overflows twice, and takes two batches more. Fused optimizers are called even to skip."""
    for fused in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        num_batches = 0
        with exchanging(partial(adamw, fused=fused), TOPK, every=4) as (net, optimizer, exchange):
            while exchange.num_steps < 8:
                optimizer.zero_grad()
                scaler.scale(loss_of(net, num_batches)).backward()
                if dist.get_rank() == 1 and num_batches in (2, 7):
                    net.last.bias.grad[0] = math.inf
                scaler.step(optimizer)
                scaler.update()
                num_batches += 1
            assert num_batches == (8, 10)[dist.get_rank()]
            assert exchange.num_rounds == 2 and exchange.total.num_skipped == 0
            assert flat_parameters(net).isfinite().all()


@on_ranks(2)
def test_a_round_that_is_not_finite_is_taken_back() -> None:
    for make in (adamw, lambda net: torch.optim.Adagrad(net.parameters(), initial_accumulator_value=0.1)):
        net: Any = nn.Sequential(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        with exchanging(make, TOPK, net, every=2, outer=nesterov) as (_, optimizer, exchange):
            train(net, optimizer, range(2))
            before = flat_parameters(net), net[1].running_mean.clone(), exchange.total.residual_norm
            outer_before = exchange.state_dict()["updates"]["outer_state"]
            with listening() as said:
                spoil_a_round(net, optimizer)
            after = flat_parameters(net), net[1].running_mean.clone(), exchange.total.residual_norm
            assert same(before, after) and same(exchange.state_dict()["updates"]["outer_state"], outer_before)
            assert said == [
                "after round 1 a rank's update was not finite: all ranks went back to where the round began; "
                "total.num_skipped counts such rounds"
            ]
            assert (exchange.num_steps, exchange.num_rounds) == (4, 1)
            train(net, optimizer, range(4, 8))  # the optimizer of rank 1 is as good as new
            assert (exchange.num_steps, exchange.num_rounds, exchange.total.num_skipped) == (8, 3, 1)
            assert flat_parameters(net).isfinite().all() and not torch.equal(flat_parameters(net), before[0])
            assert "1 round whose updates were not finite" in exchange.summary()
            net[1].running_var[0] = math.inf if dist.get_rank() == 1 else 1.0  # a buffer alone
            train(net, optimizer, range(8, 10))
            assert exchange.total.num_skipped == 2 and net[1].running_var.isfinite().all()


def spoil_a_round(net: nn.Module, optimizer: Optimizer) -> None:
    """Two steps; in the first one the inputs of rank 1 hold a NaN."""
    for step in range(2):
        optimizer.zero_grad()
        inputs = batch(step)
        if step == 0 and dist.get_rank() == 1:
            inputs[0, 0] = math.nan
        net(inputs).square().mean().backward()
        assert flat_gradients(net).isfinite().all() == (dist.get_rank() == 0)
        optimizer.step()


@on_ranks(2)
def test_buffers() -> None:
    for how in ("mean", "rank0", "local"):
        net: Any = nn.Sequential(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        net.register_buffer("mask", torch.full((1000,), -math.inf))  # never changes, so it is never sent
        net.register_buffer("cache", torch.zeros(1))
        weight = (0.75, 0.25)[dist.get_rank()]
        with exchanging(sgd, TOPK, net, buffers=how, weight=weight) as (_, optimizer, exchange):
            net.get_buffer("cache").resize_(1 + dist.get_rank())  # which stays local
            net(batch(0)).square().mean().backward()
            mine = net[1].running_mean.clone()
            net[1].num_batches_tracked += 10 * dist.get_rank()
            optimizer.step()
            expected = {"mean": 2 * mean_over_ranks(weight * mine), "local": mine}.get(how, mine)
            if how == "rank0":
                dist.broadcast(expected, 0)
            assert torch.allclose(net[1].running_mean, expected, atol=1e-7)
            assert int(net[1].num_batches_tracked) == (11 if how == "local" and dist.get_rank() else 1)
            assert exchange.last_step.sent_bytes < 500
            optimizer.step()  # and another round
            assert net.get_buffer("mask").isinf().all()
            assert net.get_buffer("cache").numel() == 1 + dist.get_rank()
