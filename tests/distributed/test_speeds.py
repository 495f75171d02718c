"""Machines that differ: ranks whose rounds have different numbers of steps."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import regtopk
from regtopk.rounds import Rounds
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.test_delay import Slope, unsent
from tests.distributed.test_updates import TOPK, adamw, is_same_on_all_ranks, train
from tests.distributed.training import algorithm_state, closing, flat_parameters, make_net, refusal, same

EVERYS = {2: [4, 2], 4: [6, 6, 3, 2]}
OPTIONS = [{}, {"fragments": 2}, {"delay": 1}]


def test_fragments_go_in_one_order() -> None:
    for every in range(1, 8):
        for fragments in range(1, every + 1):
            rounds = Rounds("updates", every=every, fragments=fragments)
            sent = [rounds.num_sent(step) for step in range(3 * every + 1)]
            assert sent[-1] == 3 * fragments
            assert sent[1:] == [before + len(rounds.due(s)) for s, before in enumerate(sent[:-1], start=1)]
            assert [rounds.num_sent(rounds.step_after(n)) for n in range(9)] == list(range(9))


def made(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, regtopk.UpdateExchange]:
    net = make_net()
    optimizer = adamw(net)
    every = EVERYS[dist.get_world_size()][dist.get_rank()]
    return net, optimizer, regtopk.UpdateExchange(net, optimizer, TOPK, every=every, **options)


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(2)
def test_nothing_is_lost(options: dict[str, Any]) -> None:
    """first - theta_start + the weighted residuals = the weighted sum of all local steps, also mid-round."""
    every = EVERYS[2][dist.get_rank()]
    net = Slope()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    exchange = regtopk.UpdateExchange(net, optimizer, TOPK, every=every, weight="steps", **options)
    learned, generator = torch.zeros(70, dtype=torch.float64), torch.Generator().manual_seed(dist.get_rank())
    with closing(exchange):
        assert exchange.everys == [4, 2] and exchange.weights == [4 / 6, 2 / 6]
        for _ in range(3 * every + (dist.get_rank() == 0)):  # rank 0 is inside a round
            slope = torch.randn(70, generator=generator)
            learned += exchange.weights[exchange.rank] * slope.double()
            optimizer.zero_grad()
            net(slope).backward()
            optimizer.step()
        exchange.finish()
        assert exchange.num_rounds == 4
        (state,) = exchange.state_dict()["workers"].values()
        residual = torch.cat([entry["residual"] for entry in state["entries"].values()]).double()
        residual *= exchange.weights[exchange.rank]
        told = exchange.summary()
        assert "by rank   steps per round, and time spent waiting: 4 (" in told and " s), 2 (" in told
    for mine in (learned, residual):
        dist.all_reduce(mine)
    arrived = 1 - torch.cat([p.detach() for p in net.parts]).double()
    assert residual.norm() > 0 and torch.allclose(arrived + residual, learned, rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(4)
def test_resumed_bit_for_bit(options: dict[str, Any]) -> None:
    every = EVERYS[4][dist.get_rank()]
    net, optimizer, exchange = made(weight="steps", **options)
    with closing(exchange):
        train(net, optimizer, range(2 * every + (every > 3)))
        saved = exchange.state_dict()
        train(net, optimizer, range(2 * every + (every > 3), 4 * every))
        exchange.finish()
        end = flat_parameters(net), algorithm_state(exchange)
    net, optimizer, exchange = made(weight="steps", **options)
    with closing(exchange):
        exchange.load_state_dict(saved)
        train(net, optimizer, range(exchange.num_steps, 4 * every))
        exchange.finish()
        assert same((flat_parameters(net), algorithm_state(exchange)), end)
        assert is_same_on_all_ranks(flat_parameters(net))


@pytest.mark.parametrize("options", OPTIONS)
def test_other_ranks_go_on(two_ranks: Ranks, four_ranks: Ranks, options: dict[str, Any]) -> None:
    """What no rank has sent yet is conserved, and all are as far in the order of fragments."""
    before = four_ranks.run(train_some, options)[0]
    answers = two_ranks.run(train_some, options, before)
    after = regtopk.merge_state_dicts([state for state, _ in answers])
    assert before["updates"]["every"] == EVERYS[4] and after["updates"]["every"] == EVERYS[2]
    for name in before["updates"]["start"]:
        assert torch.allclose(unsent(after, name), unsent(before, name), rtol=1e-5, atol=1e-7)
    assert torch.equal(answers[0][1], answers[1][1])


def train_some(options: dict[str, Any], saved: Any = None) -> Any:
    """The state inside a round; or what is loaded, and the model that all ranks have later."""
    net, optimizer, exchange = made(weight="steps", **options)
    every = exchange.everys[exchange.rank]
    with closing(exchange):
        if saved is None:
            train(net, optimizer, range(2 * every + (every > 3)))
            return exchange.gather_state_dict()
        exchange.load_state_dict(saved)
        state = exchange.state_dict()
        train(net, optimizer, range(2 * every))
        exchange.finish()
        return state, flat_parameters(net)


@on_ranks(2)
def test_finish_names_ranks_that_have_sent_unequally_often() -> None:
    net, optimizer, exchange = made(delay=1)
    with closing(exchange):
        if dist.get_rank() == 0:
            train(net, optimizer, range(4))
        said = refusal(exchange.finish)
        assert said[1] == "all ranks must have the same number of exchanges, got 1 on rank 0, 0 on rank 1"
        if dist.get_rank() == 1:
            train(net, optimizer, range(2))
        exchange.finish()
        assert is_same_on_all_ranks(flat_parameters(net))


@pytest.mark.parametrize("fragments", [1, 3])
@on_ranks(4)
def test_an_update_far_longer_than_others_is_scaled_down(fragments: int) -> None:
    """To clip_norm times the median of the ranks that have weight, each fragment by itself."""
    weights, slopes = [0.5, 0.25, 0.0, 0.25], torch.randn(4, 70, generator=torch.Generator().manual_seed(3))
    slopes *= torch.tensor([1.0, 100.0, 0.001, 2.0]).unsqueeze(1)
    net, rank = Slope(), dist.get_rank()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    options: dict[str, Any] = {"every": 3, "fragments": fragments, "weight": weights[rank], "clip_norm": 1.5}
    expected = torch.ones(70)
    with closing(regtopk.UpdateExchange(net, optimizer, regtopk.Dense(), **options)) as exchange:
        for _ in range(3):
            optimizer.zero_grad()
            net(slopes[rank]).backward()
            optimizer.step()
        exchange.finish()
        told = exchange.summary()
    for at in [torch.arange(70)] if fragments == 1 else torch.arange(70).split([40, 7, 23]):
        own = slopes[:, at]
        norms = own.norm(dim=1)
        bounds = (1.5 * norms[[0, 1, 3]].median() / norms).clamp(max=1.0)
        assert bounds[1] < 1
        expected[at] -= 3 * ((torch.tensor(weights) * bounds).unsqueeze(1) * own).sum(0)
    found = torch.cat([p.detach() for p in net.parts])
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert f"clipped   {'1 update' if fragments == 1 else '5 updates'} of rank 1, by clip_norm" in told
