"""Machines that differ: ranks whose rounds have different numbers of steps, tokens or lengths of updates."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import regtopk
from regtopk.rounds import Rounds
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.test_updates import TOPK, is_same_on_all_ranks
from tests.distributed.training import algorithm_state, closing, flat_parameters, made, merged, refusal, same

EVERYS = {2: [4, 2], 4: [6, 6, 3, 2]}
CASES: list[tuple[Any, dict[str, Any]]]
CASES = list(product(["steps", "tokens"], [{}, {"fragments": 2}, {"delay": 1}]))
ALIKE = [{"delay": 3}, {"delay": 2, "fragments": 3}, {"fragments": 3}, {"delay": 2, "fragments": 2}]
CASES += [(None, {"every": 4, **options}) for options in ALIKE]


def test_fragments_go_in_one_order() -> None:
    for every in range(1, 8):
        for fragments in range(1, every + 1):
            rounds = Rounds("updates", every=every, fragments=fragments)
            sent = [rounds.num_sent(step) for step in range(3 * every + 1)]
            assert sent[-1] == 3 * fragments
            assert sent[1:] == [before + len(rounds.due(s)) for s, before in enumerate(sent[:-1], start=1)]
            assert [rounds.num_sent(rounds.step_after(n)) for n in range(9)] == list(range(9))


class Slope(nn.Module):
    """Its gradients do not depend on its parameters: what a step changes is known beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.ones(n)) for n in (40, 7, 23))

    def forward(self, slope: Tensor) -> Tensor:
        return (torch.cat(list(self.parts)) * slope).sum()


class Training:
    """A slope of 70 entries, other in every step, that is learned from different numbers of tokens."""

    def __init__(self, algorithm: Any = TOPK, **options: Any) -> None:
        self.net, self.rank = Slope(), dist.get_rank()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)
        options = {"every": EVERYS[dist.get_world_size()][self.rank], **options}
        self.every, self.weight = options["every"], options.get("weight")
        self.exchange = regtopk.UpdateExchange(self.net, self.optimizer, algorithm, **options)

    def train(self, num_steps: int) -> tuple[Tensor, float]:
        """What was learned in some steps, and from how many tokens."""
        learned, tokens = torch.zeros(70, dtype=torch.float64), 0
        for step in range(self.exchange.num_steps, self.exchange.num_steps + num_steps):
            slope = torch.randn(70, generator=torch.Generator().manual_seed(100 * step + self.rank))
            now = 1 + (7 * step + 3 * self.rank) % 5
            learned, tokens = learned + slope, tokens + now
            self.optimizer.zero_grad()
            self.net(slope).backward()
            if self.weight == "tokens":
                self.exchange.count(now)
            self.optimizer.step()
        return learned, tokens

    def result(self) -> Any:
        return flat_parameters(self.net), algorithm_state(self.exchange)


@pytest.mark.parametrize(
    ("weight", "options"), [case for case in CASES if case != ("tokens", {"fragments": 2})]
)
@on_ranks(2)
def test_nothing_is_learned_twice_or_lost(weight: Any, options: dict[str, Any]) -> None:
    """first - theta_start + the weighted residuals = the sum over rounds of what ranks learned, weighed."""
    rank, expected = dist.get_rank(), torch.zeros(70, dtype=torch.float64)
    own = {"steps": [4 / 6, 2 / 6], "tokens": [0.5, 0.5], None: [0.25, 0.75]}[weight][rank]
    with made(Training, weight=weight or own, **options) as (training, exchange):
        assert exchange.everys == ([4, 2] if weight else [4, 4]) and exchange.weights[rank] == own
        for number in range(4):  # the last round has one step, and of a rank that is slow none
            learned, tokens = training.train(training.every if number < 3 else training.every // 4)
            total = torch.tensor(float(tokens))
            dist.all_reduce(total)
            expected += learned * (tokens / float(total) if weight == "tokens" else own)
        exchange.finish()
        assert exchange.num_rounds == 4
        (state,) = exchange.state_dict()["workers"].values()
        told = "by rank   steps per round, and time spent waiting: 4 ("
        assert (told in exchange.summary()) == (weight is not None)
    residual = torch.cat([entry["residual"] for entry in state["entries"].values()]).double() * own
    for mine in (expected, residual):
        dist.all_reduce(mine)
    arrived = 1 - flat_parameters(training.net).double()
    assert residual.norm() > 0 and torch.allclose(arrived + residual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("weight", "options"), CASES)
@on_ranks(2)
def test_resumed_bit_for_bit(weight: str, options: dict[str, Any]) -> None:
    first, again = (Training(weight=weight, clip_norm=0.9, **options) for _ in range(2))
    inside = 2 * first.every + (first.every > 3)
    with closing(first.exchange), closing(again.exchange):
        first.train(inside)
        again.exchange.load_state_dict(first.exchange.state_dict())
        for training in (first, again):
            training.train(4 * training.every - inside)
            training.exchange.finish()
        assert same(again.result(), first.result()) and is_same_on_all_ranks(flat_parameters(again.net))


@pytest.mark.parametrize(("weight", "options"), CASES)
def test_other_ranks_go_on(two_ranks: Ranks, four_ranks: Ranks, weight: str, options: dict[str, Any]) -> None:
    """What no rank has sent yet is conserved, and all are as far in the order of fragments."""
    before = four_ranks.run(train_some, weight, options)[0]
    answers = two_ranks.run(train_some, weight, options, before)
    after = regtopk.merge_state_dicts([state for state, _ in answers])
    everys = [saved["updates"]["every"] for saved in (before, after)]
    assert everys == ([EVERYS[4], EVERYS[2]] if weight else [4, 4])
    parts = {1: (0, 0, 0), 2: (0, 1, 1), 3: (0, 1, 2)}[options.get("fragments", 1)]
    for fragment, name in zip(parts, after["updates"]["start"], strict=True):
        old, new = unsent(before, name, fragment), unsent(after, name, fragment)
        assert old.norm() > 0 and torch.allclose(new, old, rtol=1e-5, atol=1e-6)
    assert torch.equal(answers[0][1], answers[1][1])


def train_some(weight: str, options: dict[str, Any], saved: Any = None) -> Any:
    """The state inside a round; or what is loaded, and the model that all ranks have later."""
    with made(Training, weight=weight, **options) as (training, exchange):
        if saved is None:
            training.train(2 * training.every + (training.every > 3))
            return exchange.gather_state_dict()
        exchange.load_state_dict(saved)
        state = exchange.state_dict()
        training.train(2 * training.every)
        exchange.finish()
        return state, flat_parameters(training.net)


def unsent(saved: dict[str, Any], name: str, fragment: int = 0) -> Tensor:
    """The weighted sum of residuals and of what was learned since, which tokens scale."""
    workers = [saved["workers"][str(n)] for n in range(len(saved["weights"]))]
    tokens = [max(0.0, worker["updates"][0].get("tokens", [1.0] * 3)[fragment]) for worker in workers]
    total = torch.zeros(())
    for worker, weight, own_tokens in zip(workers, saved["weights"], tokens, strict=True):
        (mine,) = worker["updates"]
        start = mine["sent"].get(name, saved["updates"]["start"][name])
        scale = len(workers) * own_tokens / sum(tokens) if sum(tokens) else 1.0
        learned = start - mine["parameters"].get(name, start)
        total = total + weight * (worker["entries"][name]["residual"] + scale * learned)
    return total


@on_ranks(2)
def test_finish_names_ranks_that_have_sent_unequally_often() -> None:
    with made(Training, delay=1) as (training, exchange):
        training.train(4 if exchange.rank == 0 else 0)
        said = refusal(exchange.finish)
        assert said[1] == "all ranks must have the same number of exchanges, got 1 on rank 0, 0 on rank 1"
        training.train(0 if exchange.rank == 0 else 2)
        exchange.finish()
        assert is_same_on_all_ranks(flat_parameters(training.net))


@pytest.mark.parametrize("fragments", [1, 3])
@on_ranks(4)
def test_an_update_far_longer_than_others_is_scaled_down(fragments: int) -> None:
    """To clip_norm times the median of the ranks that have weight, each fragment by itself."""
    weights, factors = [0.5, 0.25, 0.0, 0.25], torch.tensor([1.0, 100.0, 0.001, 2.0])
    slopes = torch.randn(4, 70, generator=torch.Generator().manual_seed(3)) * factors.unsqueeze(1)
    options: dict[str, Any] = {"every": 3, "fragments": fragments, "clip_norm": 1.5}
    with made(Training, regtopk.Dense(), weight=weights[dist.get_rank()], **options) as (training, exchange):
        for _ in range(3):
            training.optimizer.zero_grad()
            training.net(slopes[exchange.rank]).backward()
            training.optimizer.step()
        exchange.finish()
        told = exchange.summary()
    expected = torch.ones(70)
    for at in torch.arange(70).split([40, 7, 23] if fragments > 1 else [70]):
        norms = slopes[:, at].norm(dim=1)
        scales = torch.tensor(weights) * (1.5 * norms[[0, 1, 3]].median() / norms).clamp(max=1.0)
        expected[at] -= 3 * (scales.unsqueeze(1) * slopes[:, at]).sum(0)
    assert torch.allclose(flat_parameters(training.net), expected, rtol=1e-4, atol=1e-4)
    assert f"clipped   {'1 update' if fragments == 1 else '5 updates'} of rank 1, by clip_norm" in told


@on_ranks(2)
def test_tokens_that_nobody_counts() -> None:
    with made(Training, weight="tokens", every=1) as (training, exchange):
        if exchange.rank == 0:
            exchange.count(3)
        training.net(torch.ones(70)).backward()
        assert refusal(training.optimizer.step)[1] == (
            "every rank must call count(tokens) before optimizer.step() where weight is 'tokens', got no "
            "call on rank(s) [1] since the last exchange"
        )
        assert refusal(lambda: exchange.count(-1))[1] == "tokens must be finite and >= 0, got -1"
    with made(Training) as (_, exchange):
        assert refusal(lambda: exchange.count(1))[1] == "weight must be 'tokens' where count() is called"
    said = refusal(lambda: Training(weight=("tokens", None)[dist.get_rank()]))
    told = "all ranks must have the same kind of weight, got 'tokens' on rank 0, 'a number' on rank 1"
    assert said[1] == told


@on_ranks(2)
def test_ranks_that_stand_elsewhere_in_a_round_finish_save_and_load() -> None:
    with made(Training, every=4) as (training, exchange):
        training.train(5 + exchange.rank)
        inside = exchange.state_dict()
        exchange.finish()
        exchange.load_state_dict(exchange.state_dict())
        exchange.load_state_dict(inside)
        assert exchange.num_steps == 5 + exchange.rank
    with made(Training) as (_, exchange):
        kind, text = refusal(lambda: exchange.stop_when(True))
        assert kind == "ClusterError" and "got [4, 2] by rank: stop at a number of num_rounds" in text


@on_ranks(2)
def test_what_is_learned_inside_a_round_is_clipped_on_other_ranks_too() -> None:
    with made(Training, every=4, clip_norm=3.0) as (first, exchange):
        first.net(torch.full((70,), 1000.0 if exchange.rank else 1.0)).backward()
        first.optimizer.step()
        saved = merged(exchange)
    with made(Training, every=4, clip_norm=3.0, weight=(0.75, 0.25)[dist.get_rank()]) as (_, exchange):
        exchange.load_state_dict(saved)
        (state,) = exchange.state_dict()["workers"].values()
        residual = torch.cat([entry["residual"] for entry in state["entries"].values()])
        expected = 3.0 * 0.5 / 0.25 if exchange.rank else 0.5 / 0.75
        assert torch.allclose(residual, torch.full((70,), expected))


@on_ranks(4)
def test_ranks_that_learned_from_nothing_do_not_decide_what_is_clipped() -> None:
    rank, options = dist.get_rank(), {"every": 1, "weight": "tokens", "clip_norm": 3.0}
    with made(Training, regtopk.Dense(), **options) as (training, exchange):
        exchange.count(1 if rank < 2 else 0)
        training.net(torch.full((70,), (1.0, 1e4, 0.0, 0.0)[rank])).backward()
        training.optimizer.step()
        assert torch.allclose(flat_parameters(training.net), torch.full((70,), 1 - (1 + 3) / 2))
        assert "clipped   1 update of rank 1, by clip_norm" in exchange.summary()
