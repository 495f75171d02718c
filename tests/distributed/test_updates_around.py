"""UpdateExchange with what users have around it: weights, tied and frozen layers, Muon, LBFGS and more."""

import pickle
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import regtopk
from tests.distributed.ranks import on_ranks
from tests.distributed.test_fsdp_dcp import Job
from tests.distributed.test_updates import TOPK, adamw, exchanging, sgd, train, updating
from tests.distributed.test_updates import mean_over_ranks as mean
from tests.distributed.training import closing, ddp, flat_parameters, listening, loss_of, make_net, refusal


@on_ranks(2)
def test_start_from_rank_0() -> None:
    torch.manual_seed(dist.get_rank())
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net[2].weight.requires_grad_(False)  # frozen ones too
    net[1].num_batches_tracked.fill_(7 + dist.get_rank())
    mine = flat_parameters(net)
    with exchanging(sgd, regtopk.Dense(), net):
        assert torch.equal(mine, flat_parameters(net)) == (dist.get_rank() == 0)
        assert int(net[1].num_batches_tracked) == 7


@on_ranks(2)
def test_weigh_ranks_and_skip_layers() -> None:
    net = make_net()
    optimizer = sgd(net)
    local: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: local.append(flat_parameters(net)))
    weight = (0.75, 0.25)[dist.get_rank()]
    options: dict[str, Any] = {"weight": weight, "skip": lambda name, p: p.ndim == 1}
    made = exchanging(lambda _: optimizer, TOPK, net, dense_steps=3, every=2, **options)
    with made as (_, _, exchange):
        for first in (0, 2, 4):
            train(net, optimizer, range(first, first + 2))
            expected = 2 * mean(weight * local[-1])
            is_close = (flat_parameters(net) - expected).abs() < 1e-6
            is_bias = torch.cat([torch.full((p.numel(),), p.ndim == 1) for p in net.parameters()])
            assert bool(is_close[is_bias].all())
            assert bool(is_close.all()) == (first < 4)  # three steps are two rounds
        assert exchange.last_step.num_entries == int(is_bias.sum()) + round(0.1 * int((~is_bias).sum()))
        assert all(bucket.flat is None for bucket in exchange._steps.buckets.all)  # no copy of the update


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


@on_ranks(2)
def test_train_tied_and_frozen() -> None:
    """Compiled as well, which changes names and not what is exchanged."""
    results = []
    for compiled in (False, True):
        net = Tied()
        frozen = net.frozen.weight.clone()
        model: Any = torch.compile(net, backend="eager") if compiled else net
        with exchanging(adamw, TOPK, model, every=2) as (_, optimizer, exchange):  # of frozen ones too
            train(model, optimizer, range(4))
            assert exchange.num_rounds == 2 and torch.equal(frozen, net.frozen.weight)
            assert net.head.weight is net.embed.weight
            assert [name for name, _ in exchange.state_dict()["parameters"]] == ["empty", "embed.weight"]
            assert exchange.last_step.num_entries == 16
        results.append(flat_parameters(net))
    assert torch.equal(*results)


@on_ranks(2)
def test_train_in_bfloat16() -> None:
    """theta_start is kept in float32, so updates too small for bfloat16 are not lost."""
    net = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        net.weight.fill_(1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=2.0**-7)  # 1 - 1/128, which bfloat16 can tell from 1
    net.weight.grad = torch.full_like(net.weight, 1.0 if dist.get_rank() == 0 else 0.0)
    with exchanging(lambda _: optimizer, regtopk.Dense(), net) as (_, _, exchange):
        for number in range(1, 5):
            optimizer.step()  # half of it on average, which takes two steps to show
            saved = exchange.state_dict()["updates"]["start"]["weight"]
            assert saved.dtype == torch.float32 and bool((saved == 1 - number * 2.0**-8).all())
            assert bool((net.weight == saved.bfloat16()).all())


@on_ranks(2)
def test_train_with_lbfgs() -> None:
    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(net, 0)
        loss.backward()
        return loss.item()

    make = partial(torch.optim.LBFGS, lr=0.1, max_iter=3)
    with exchanging(lambda net: make(net.parameters()), regtopk.Dense()) as (net, optimizer, exchange):
        for _ in range(2):
            optimizer.step(closure)
        assert exchange.num_rounds == 2


@on_ranks(2)
def test_a_model_that_is_read_inside_a_round_is_told_of_once(tmp_path: Path) -> None:
    checkpoints = regtopk.Checkpoints(tmp_path)
    with listening() as said, updating(every=2) as (net, optimizer, exchange), checkpoints:
        train(net, optimizer, range(2))
        net.state_dict()
        train(net, optimizer, range(2, 3))
        with exchange.agreed():
            net.state_dict()
        checkpoints.save(3, exchange=exchange, model=net)
        checkpoints.load(model=net, exchange=exchange)
        for copy in (deepcopy(net), pickle.loads(pickle.dumps(net))):
            copy.state_dict()
        assert said == []
        net.first.state_dict()
        net.state_dict()
    assert said == [
        "state_dict() of the model was called inside a round: it holds this rank's weights. Call it `with "
        "exchange.agreed():` for those that all ranks share, or save exchange.state_dict()"
    ]


@on_ranks(4)
def test_where_one_rank_must_stop_all_stop() -> None:
    net, rank = make_net(), dist.get_rank()
    kinds: list[Any] = [regtopk.attach(ddp(), regtopk.Dense()), Job("attach", (2, 2)).exchange]
    kinds += [regtopk.UpdateExchange(net, sgd(net), regtopk.Dense(), every=4, delay=2)]
    for exchange in kinds:
        with closing(exchange):
            num_batches, step = 3 + 4 * (rank != 3), 0
            while not exchange.stop_when(step == num_batches):
                step += 1
            assert step == 3
            said = refusal(lambda: exchange.stop_when(torch.ones(1)))  # noqa: B023
        assert said == ("ArgumentError", "flag must be True or False, got tensor([1.])")
        assert refusal(lambda: exchange.stop_when(False))[0] == "ClusterError"  # noqa: B023
