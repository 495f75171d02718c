"""UpdateExchange: the optimizer runs first, and what it changed is exchanged."""

import math
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import regtopk
from tests.distributed.ranks import Ranks
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


def adamw(net: nn.Module) -> Optimizer:
    """With an epsilon that keeps the signs of tiny gradients from deciding anything."""
    return torch.optim.AdamW(net.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-3)


def nesterov(parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def train(
    net: nn.Module, optimizer: Optimizer, steps: range, act: Callable[[int], Any] = lambda step: None
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
        act(step)


def mean_over_ranks(tensor: Tensor) -> Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def is_same_on_all_ranks(tensor: Tensor) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tensor)
    return all(torch.equal(tensor, other) for other in everyone)


# Equal to what is known.


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_dense_updates_of_sgd_are_ddp(two_ranks: Ranks, four_ranks: Ranks, num_ranks: int) -> None:
    {2: two_ranks, 4: four_ranks}[num_ranks].run(compare_with_ddp)


def compare_with_ddp() -> None:
    ddp = DistributedDataParallel(make_net())
    train(ddp, sgd(ddp), range(10))
    for algorithm in (regtopk.Dense(), regtopk.TopK(density=1.0)):
        for deterministic in (True, False):
            net = make_net()
            optimizer = sgd(net)
            with closing(
                regtopk.UpdateExchange(net, optimizer, algorithm, deterministic=deterministic)
            ) as exchange:
                train(net, optimizer, range(10))
                # an update is rounded to what parameters can tell apart: 10 roundings of numbers up to 0.3
                assert (flat_parameters(net) - flat_parameters(ddp)).abs().max() < 10 * 2**-24
                assert is_same_on_all_ranks(flat_parameters(net))
                assert exchange.num_steps == exchange.num_rounds == 10


def test_dense_rounds_are_diloco(two_ranks: Ranks) -> None:
    two_ranks.run(compare_with_diloco)


def compare_with_diloco() -> None:
    for every, outer in ((2, None), (4, None), (2, nesterov), (4, nesterov)):
        net = make_net()
        optimizer = adamw(net)
        with closing(
            regtopk.UpdateExchange(net, optimizer, regtopk.Dense(), every=every, outer=outer)
        ) as exchange:
            train(net, optimizer, range(12))
            assert exchange.num_steps == 12 and exchange.num_rounds == 12 // every
        assert (flat_parameters(net) - diloco(every, outer is not None)).abs().max() < 1e-6, (every, outer)


def diloco(every: int, has_momentum: bool) -> Tensor:
    """D = theta_start - mean of theta_n; u := 0.9 u + D; theta := theta_start - 0.7 (D + 0.9 u)."""
    net = make_net()
    optimizer = adamw(net)
    start, momentum = flat_parameters(net), torch.zeros(())
    for first in range(0, 12, every):
        train(net, optimizer, range(first, first + every))
        delta = start - mean_over_ranks(flat_parameters(net))
        momentum = 0.9 * momentum + delta
        start = start - (0.7 * (delta + 0.9 * momentum) if has_momentum else delta)
        nn.utils.vector_to_parameters(start.clone(), net.parameters())  # which does not copy
    return start


def test_sparse_updates_keep_a_residual(two_ranks: Ranks) -> None:
    two_ranks.run(compare_with_error_feedback)


def compare_with_error_feedback() -> None:
    net = make_net()
    optimizer = adamw(net)
    local: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: local.append(flat_parameters(net)))  # before the exchange's
    with closing(regtopk.UpdateExchange(net, optimizer, TOPK, every=2)) as exchange:
        start, residual = flat_parameters(net), torch.zeros(3363)
        for first in range(0, 8, 2):
            train(net, optimizer, range(first, first + 2))
            accumulated = residual + start - local[-1]
            kept = accumulated.abs().topk(336).indices
            sent = torch.zeros(3363).index_copy(0, kept, accumulated[kept])
            residual = accumulated - sent
            start = start - mean_over_ranks(sent)
            assert (flat_parameters(net) - start).abs().max() < 1e-7
        assert exchange.last_step.num_entries == 336
        assert abs(exchange.last_step.residual_norm - float(residual.norm())) < 1e-5
        assert exchange.last_step.dense_bytes == 2 * 4 * 3363  # of two steps
        assert exchange.summary().startswith("topk: 4 rounds of 2 steps on 2 workers; this rank:")


# What users have around it.


def test_what_users_have_around_it(two_ranks: Ranks) -> None:
    two_ranks.run(train_with_all_that)


def train_with_all_that() -> None:
    start_from_rank_0()
    weigh_ranks_and_skip_layers()
    schedule_clip_and_accumulate()
    train_tied_and_frozen()
    train_with_two_optimizers()
    train_in_bfloat16()
    train_with_lbfgs()


@contextmanager
def exchanging(net: nn.Module, optimizer: Optimizer, **options: Any) -> Any:
    options = {"algorithm": regtopk.Dense(), **options}
    with closing(regtopk.UpdateExchange(net, optimizer, **options)) as exchange:
        yield exchange
        assert is_same_on_all_ranks(flat_parameters(net))


def start_from_rank_0() -> None:
    torch.manual_seed(dist.get_rank())
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[2].weight.requires_grad_(False)  # frozen ones too
    net[1].num_batches_tracked.fill_(7 + dist.get_rank())
    mine = flat_parameters(net)
    with exchanging(net, sgd(net)):
        assert torch.equal(mine, flat_parameters(net)) == (dist.get_rank() == 0)
        assert int(net[1].num_batches_tracked) == 7


def weigh_ranks_and_skip_layers() -> None:
    net = make_net()
    optimizer = sgd(net)
    local: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: local.append(flat_parameters(net)))
    weight = (0.75, 0.25)[dist.get_rank()]
    options: dict[str, Any] = {"algorithm": TOPK, "weight": weight, "skip": lambda name, p: p.ndim == 1}
    with exchanging(net, optimizer, dense_steps=3, every=2, **options) as exchange:
        for first in (0, 2, 4):
            train(net, optimizer, range(first, first + 2))
            expected = 2 * mean_over_ranks(weight * local[-1])
            is_close = (flat_parameters(net) - expected).abs() < 1e-6
            is_bias = torch.cat([torch.full((p.numel(),), p.ndim == 1) for p in net.parameters()])
            assert bool(is_close[is_bias].all())
            assert bool(is_close.all()) == (first < 4)  # three steps are two rounds
        assert exchange.last_step.num_entries == int(is_bias.sum()) + round(0.1 * int((~is_bias).sum()))
        assert [bucket.flat for bucket in exchange._steps.buckets.all] == [
            None,
            None,
        ]  # no copy of the update


def schedule_clip_and_accumulate() -> None:
    """Four batches a step, clipped, by a schedule; compared with the same loop on all data of both ranks."""
    results = []
    for is_exchanged in (True, False):
        net = make_net()
        groups: list[dict[str, Any]] = [
            {"params": list(net.first.parameters()), "lr": 0.2},
            {"params": list(net.last.parameters())},
        ]
        for layer in (net.extra, net.middle):
            layer.requires_grad_(False)
        optimizer = torch.optim.SGD(groups, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        exchange = regtopk.UpdateExchange(net, optimizer, regtopk.Dense()) if is_exchanged else None
        for number in range(16):
            (loss_of(net, number) / 4).backward()
            if number % 4 == 3:
                norm = nn.utils.clip_grad_norm_(net.parameters(), 0.01)
                assert norm > 0.01
                if not is_exchanged:
                    for p in net.parameters():
                        if p.grad is not None:
                            p.grad = mean_over_ranks(p.grad)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if exchange is not None:
            assert exchange.num_steps == exchange.num_rounds == 4
            exchange.close()
        assert optimizer.param_groups[0]["lr"] == 0.05
        results.append(flat_parameters(net))
    assert (results[0] - results[1]).abs().max() < 1e-6
    assert not torch.equal(results[0], flat_parameters(make_net()))


class Tied(nn.Module):
    """An embedding whose weight is the last layer's, and a frozen layer between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(20, 8, bias=False)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(20, 8, bias=False)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.frozen(self.embed(x))) @ self.head.weight
        return result


def train_tied_and_frozen() -> None:
    """Compiled as well, which changes names and not what is exchanged."""
    results = []
    for compiled in (False, True):
        net = Tied()
        frozen = net.frozen.weight.clone()
        model: Any = torch.compile(net, backend="eager") if compiled else net
        optimizer = adamw(net)  # all parameters, frozen ones too
        with exchanging(model, optimizer, algorithm=TOPK, every=2) as exchange:
            train(model, optimizer, range(4))
            assert exchange.num_rounds == 2 and torch.equal(frozen, net.frozen.weight)
            assert net.head.weight is net.embed.weight
            assert [name for name, _ in exchange.state_dict()["parameters"]] == ["empty", "embed.weight"]
            assert exchange.last_step.num_entries == 16
        results.append(flat_parameters(net))
    assert torch.equal(*results)


def train_with_two_optimizers() -> None:
    """Muon for matrices, AdamW for the rest: an exchange for each, by pairs."""
    net = make_net()
    matrices = {name: p for name, p in net.named_parameters() if p.ndim == 2}
    others = {name: p for name, p in net.named_parameters() if p.ndim != 2}
    muon = torch.optim.Muon(matrices.values(), lr=0.01)
    adam = torch.optim.AdamW(others.values(), lr=0.01)
    local: list[Tensor] = []
    for optimizer in (muon, adam):
        optimizer.register_step_post_hook(lambda *_: local.append(flat_parameters(net)))
    with (
        closing(regtopk.UpdateExchange(matrices.items(), muon, regtopk.Dense())),
        closing(regtopk.UpdateExchange(((n, p) for n, p in others.items()), adam, TOPK)) as exchange,
    ):
        for step in range(3):
            loss_of(net, step).backward()
            muon.step()
            adam.step()
            net.zero_grad()
        assert exchange.num_rounds == 3 and exchange.last_step.num_entries == 10
    assert is_same_on_all_ranks(flat_parameters(net)) and not is_same_on_all_ranks(local[0])


def train_in_bfloat16() -> None:
    """theta_start is kept in float32, so updates too small for bfloat16 are not lost."""
    net = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        net.weight.fill_(1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-7)  # 1 - 1/128, which bfloat16 can tell from 1
    net.weight.grad = torch.full_like(net.weight, 1.0 if dist.get_rank() == 0 else 0.0)
    with exchanging(net, optimizer) as exchange:
        for number in range(1, 5):
            optimizer.step()  # half of it on average, which takes two steps to show
            saved = exchange.state_dict()["updates"]["start"]["weight"]
            assert saved.dtype == torch.float32 and bool((saved == 1 - number * 2.0**-8).all())
            assert bool((net.weight == saved.bfloat16()).all())


def train_with_lbfgs() -> None:
    net = make_net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        return loss.item()

    with exchanging(net, optimizer) as exchange:
        for _ in range(2):
            optimizer.step(closure)
        assert exchange.num_rounds == 2


# GradScaler.


def test_a_step_that_a_grad_scaler_skips_is_none(two_ranks: Ranks) -> None:
    two_ranks.run(overflow_on_one_rank)


def overflow_on_one_rank() -> None:
    """Rank 1 overflows twice, and takes two batches more. Fused optimizers are called even to skip."""
    for fused in (False, True):
        net = make_net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        num_batches = 0
        with exchanging(net, optimizer, algorithm=TOPK, every=4) as exchange:
            while exchange.num_steps < 8:
                optimizer.zero_grad()
                scaler.scale(loss_of(net, num_batches)).backward()
                if dist.get_rank() == 1 and num_batches in (2, 7):
                    net.last.bias.grad[0] = math.inf  # type: ignore[index]
                scaler.step(optimizer)
                scaler.update()
                num_batches += 1
            assert num_batches == (8, 10)[dist.get_rank()]
            assert exchange.num_rounds == 2 and exchange.total.num_skipped == 0
            assert flat_parameters(net).isfinite().all()


# Not finite.


def test_a_round_that_is_not_finite_is_taken_back(two_ranks: Ranks) -> None:
    two_ranks.run(spoil_rounds)


def spoil_rounds() -> None:
    for make in (adamw, lambda net: torch.optim.Adagrad(net.parameters(), initial_accumulator_value=0.1)):
        net: Any = nn.Sequential(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        optimizer = make(net)
        with exchanging(net, optimizer, algorithm=TOPK, every=2, outer=nesterov) as exchange:
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


# Buffers.


def test_buffers(two_ranks: Ranks) -> None:
    two_ranks.run(join_buffers)


def join_buffers() -> None:
    for how in ("mean", "rank0", "local"):
        net: Any = nn.Sequential(nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        net.register_buffer("mask", torch.full((1000,), -math.inf))  # never changes, so it is never sent
        net.register_buffer("cache", torch.zeros(1))
        optimizer = sgd(net)
        weight = (0.75, 0.25)[dist.get_rank()]
        with exchanging(net, optimizer, algorithm=TOPK, buffers=how, weight=weight) as exchange:
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
            assert (
                net.get_buffer("mask").isinf().all()
                and net.get_buffer("cache").numel() == 1 + dist.get_rank()
            )
