"""UpdateExchange of sharded models: every rank exchanges its part with those that hold the same part."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import regtopk
from regtopk.simulate import Cluster
from tests.distributed.ranks import on_ranks
from tests.distributed.sharding import GRIDS, attached, grid, replica, sharded, whole_parameters
from tests.distributed.test_updates import adamw, is_same_on_all_ranks, nesterov, train, train_by_hand
from tests.distributed.training import algorithm_state, batch, loss_of, make_net, refusal, same, whole

TOPK = regtopk.TopK(density=0.05, value_code="4bit")
NUM_STEPS = 4


def exchanging(model: Any, algorithm: Any = TOPK, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """An exchange made after an evaluation, which leaves the root's own parameters whole."""
    optimizer = adamw(model)
    with torch.no_grad():
        loss_of(model, 0)
    options = {"process_group": grid(2, 2)["replicate"], "every": 2, **options}
    return regtopk.UpdateExchange(model, optimizer, algorithm, **options), optimizer


@on_ranks(4)
def test_the_model_is_the_ranks_own_again_after_agreed() -> None:
    model = sharded(grid(2, 2)["shard"])
    exchange, optimizer = exchanging(model, every=2, fragments=2)
    train(model, optimizer, range(3))
    with torch.no_grad():
        own = loss_of(model, 7)
        with exchange.agreed():
            agreed = loss_of(model, 7)
        assert torch.equal(loss_of(model, 7), own) and not torch.equal(agreed, own)


# Replicas that are not sharded, whose exchange is cut by hand.


@pytest.mark.parametrize("has_outer", [False, True], ids=["subtracted", "outer"])
@pytest.mark.parametrize("shape", GRIDS, ids=str)
@on_ranks(4)
def test_it_equals_replicas_that_exchange_in_the_same_parts(shape: tuple[int, int], has_outer: bool) -> None:
    mesh = grid(*shape)
    model = sharded(mesh["shard"])
    outer = nesterov if has_outer else None
    exchange, optimizer = exchanging(model, outer=outer, process_group=mesh["replicate"].get_group())
    train(model, optimizer, range(NUM_STEPS))
    replicas, shards = shape
    clusters = [Cluster(TOPK, num_workers=replicas) for _ in range(shards)]
    by_hand = train_by_hand(clusters, adamw, range(NUM_STEPS), every=2, outer=outer)
    assert torch.equal(whole_parameters(model), by_hand)
    assert exchange.num_rounds == NUM_STEPS // 2


@on_ranks(4)
def test_updates_are_scaled_by_norms_and_tokens_of_the_whole_model() -> None:
    mesh = grid(2, 2)
    model = sharded(mesh["shard"])
    optimizer, group = torch.optim.SGD(model.parameters(), lr=0.5), mesh["replicate"]
    options: dict[str, Any] = {"weight": "tokens", "clip_norm": 1.0, "process_group": group}
    exchange = regtopk.UpdateExchange(model, optimizer, regtopk.Dense(), **options)
    exchange.count(1 + dist.get_rank())  # 3 and 7 of a replica
    train(model, optimizer, range(1))
    nets = [make_net() for _ in range(2)]
    start = nn.utils.parameters_to_vector(nets[0].parameters()).detach()
    for net, ranks in zip(nets, ((0, 1), (2, 3)), strict=True):
        sum(net(batch(0, rank)).square().mean() / 2 for rank in ranks).backward()
        torch.optim.SGD(net.parameters(), lr=0.5).step()
    updates = torch.stack([start - nn.utils.parameters_to_vector(net.parameters()) for net in nets]).detach()
    norms = updates.norm(dim=1)
    scales = norms.min() / norms * torch.tensor([0.3, 0.7])
    torch.testing.assert_close(whole_parameters(model), start - (scales.unsqueeze(1) * updates).sum(0))


@on_ranks(4)
def test_parameters_in_the_cpus_memory() -> None:
    policies: list[dict[str, Any]] = [{}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}]
    models = [sharded(grid(2, 2)["shard"], **policy) for policy in policies]
    for model in models:
        _, optimizer = exchanging(model)
        train(model, optimizer, range(NUM_STEPS))
    assert torch.equal(*map(whole_parameters, models))


@on_ranks(4)
def test_a_round_with_a_nan_in_one_part_is_taken_back_everywhere() -> None:
    model = sharded(grid(2, 2)["shard"])
    exchange, optimizer = exchanging(model)
    train(model, optimizer, range(2))
    before = whole_parameters(model)
    train(model, optimizer, range(2, 3))
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    if dist.get_rank() == 1:
        model.middle.weight.grad.to_local()[0, 0] = math.nan
    optimizer.step()
    assert torch.equal(whole_parameters(model), before)
    has_state = [bool(optimizer.state.get(p)) for p in (model.middle.weight, model.first.weight)]
    assert has_state == [dist.get_rank() >= 2, True]  # both parts of what the NaN has reached start anew
    train(model, optimizer, range(4, 6))
    assert exchange.num_rounds == 2 and whole_parameters(model).isfinite().all()
    assert exchange.total.num_skipped == 1


@pytest.mark.parametrize("num_before", [3, 4], ids=["inside a round", "at its end"])
@on_ranks(4)
def test_a_checkpoint_goes_on_bit_for_bit(num_before: int) -> None:
    model = sharded(grid(2, 2)["shard"])
    exchange, optimizer = exchanging(model, outer=nesterov)
    train(model, optimizer, range(num_before))
    saved = exchange.state_dict()
    gathered = exchange.gather_state_dict()  # one for each part, on its first replica
    assert (gathered is not None) == (replica() == 0)
    if gathered is not None:
        ((place, part),) = gathered["shards"].items()
        assert place == f"{dist.get_rank() % 2} of 2" and sorted(part["workers"]) == ["0", "1"]
    train(model, optimizer, range(num_before, 6))
    again = sharded(grid(2, 2)["shard"])
    with torch.no_grad():
        for p in again.parameters():
            p.mul_(0.5)
        resumed, its_optimizer = exchanging(again, outer=nesterov)
        loss_of(again, 0)  # FSDP keeps the root whole, which must not hide what is loaded
    resumed.load_state_dict(saved)
    train(again, its_optimizer, range(num_before, 6))
    assert same(algorithm_state(resumed), algorithm_state(exchange))
    assert torch.equal(whole_parameters(model), whole_parameters(again))


SHARE = "ClusterError: ranks that share a model must have the same"
SAME = "ClusterError: all ranks must have the same"
# Options, and how the error begins.
CASES: list[tuple[dict[str, Any], str]] = [
    ({"process_group": None}, "ArgumentError: process_group must be "),
    ({"model": lambda: sharded(grid(2, 2))}, "ClusterError: mesh of parameter 'first.weight' must have 1 "),
    ({"model": lambda: attached(TOPK)[0]}, "ClusterError: FSDP unit '<root>' must have no all-reduce hook"),
    ({"every": lambda: 1 + dist.get_rank() % 2}, f"{SHARE} every, got 1 on rank 0, 2 on rank 1"),
    ({"clip_norm": lambda: 1 + replica()}, SAME + " clip_norm, got 1 on rank {first}, 2 on rank {second}"),
]


@on_ranks(4)
def test_refused_on_every_rank() -> None:
    for changes, start in CASES:
        options = {name: value() if callable(value) else value for name, value in changes.items()}
        model = options.pop("model", None) or sharded(grid(2, 2)["shard"])
        before = whole_parameters(model)
        found = ": ".join(refusal(lambda: exchanging(model, **options)))  # noqa: B023
        assert found.startswith(start.format(first=dist.get_rank() % 2, second=dist.get_rank() % 2 + 2))
        assert torch.equal(whole_parameters(model), before)


@on_ranks(4)
def test_parameters_that_come_later_are_refused() -> None:
    for name in ("later", "extra"):
        model = sharded(grid(2, 2)["shard"])
        model.extra.requires_grad_(name == "later")
        _, optimizer = exchanging(model, every=1)
        train(model, optimizer, range(1))
        model.later = fully_shard(nn.Linear(4, 4), mesh=grid(2, 2)["shard"])
        model.later.requires_grad_(name == "later")
        model.extra.requires_grad_(True)
        before = whole_parameters(model)
        optimizer.zero_grad()
        assert refusal(optimizer.step)[1].startswith(f"parameter '{name}.weight' of shape ")
        assert torch.equal(whole_parameters(model), before)


@on_ranks(4)
def test_updates_follow_gradients_after_detach() -> None:
    model, exchange = attached(TOPK)
    exchange.detach()
    models = model, sharded(grid(2, 2)["shard"])
    for model in models:
        _, optimizer = exchanging(model)
        train(model, optimizer, range(3))
    assert torch.equal(*map(whole_parameters, models))


@on_ranks(4)
def test_parameters_are_taken_as_pairs_too() -> None:
    """Replicas that began apart end with the same parameters."""
    model = sharded(grid(2, 2)["shard"])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(replica())
    optimizer = adamw(model)
    pairs = list(model.named_parameters())
    regtopk.UpdateExchange(pairs, optimizer, TOPK, process_group=grid(2, 2)["replicate"])
    train(model, optimizer, range(2))
    mine = whole(model.last.weight.detach())
    assert is_same_on_all_ranks(mine) and mine.isfinite().all()
