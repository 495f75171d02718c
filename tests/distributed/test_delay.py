"""Rounds that are under way while training goes on, and parts of the model that take turns."""

import math
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from regtopk.errors import ClusterError
from regtopk.rounds import Rounds, cut_evenly
from tests.distributed import training
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.test_updates import adamw, is_same_on_all_ranks, nesterov, train, updating

made = partial(updating, adamw)


@pytest.mark.parametrize(
    ("sizes", "num", "parts"),
    [
        ([10, 1, 1], 2, [1, 2]),
        ([1, 1, 10], 3, [1, 1, 1]),
        ([1, 100, 1, 1], 2, [2, 2]),
        ([3, 3, 3, 3, 3], 3, [2, 2, 1]),
    ],
)
def test_parts_are_about_even(sizes: list[int], num: int, parts: list[int]) -> None:
    found = cut_evenly(sizes, num)
    assert [len(part) for part in found] == parts
    assert [i for part in found for i in part] == list(range(len(sizes)))


def test_fragments_take_turns_and_none_is_left_out() -> None:
    for every in range(1, 7):
        for fragments in range(1, every + 1):
            for delay in range(every):
                rounds = Rounds("updates", every=every, delay=delay, fragments=fragments)
                sent = [[s for s in range(1, 25) if p in rounds.due(s)] for p in range(fragments)]
                got = [[s for s in range(1, 25) if p in rounds.due(s - delay)] for p in range(fragments)]
                assert len({s for steps in sent for s in steps}) == sum(map(len, sent))  # one at a time
                for mine, theirs in zip(sent, got, strict=True):
                    assert all(b - a == every for a, b in pairwise(mine)) and mine[0] <= every
                    assert theirs == [s + delay for s in mine if s + delay < 25]


@on_ranks(2)
def test_ranks_agree_while_they_differ() -> None:
    for options in ({"every": 4, "delay": 3}, {"every": 4, "delay": 1, "fragments": 4, "mix": 0.5}):
        with made(**options) as (net, optimizer, exchange):
            train(net, optimizer, range(9))
            own = training.flat_parameters(net)
            with exchange.agreed():
                assert is_same_on_all_ranks(training.flat_parameters(net))
            assert torch.equal(training.flat_parameters(net), own) and not is_same_on_all_ranks(own)
            exchange.finish()
            assert is_same_on_all_ranks(training.flat_parameters(net))


@on_ranks(2)
def test_an_outer_learning_rate_may_change_while_a_round_is_under_way() -> None:
    with made(every=2, delay=1, outer=nesterov) as (net, optimizer, exchange):
        assert exchange.outer is not None
        for step in range(8):
            train(net, optimizer, range(step, step + 1))
            if dist.get_rank() == 1:
                exchange._maker.land_all()  # the other rank's round may not have been applied yet
            exchange.outer.param_groups[0]["lr"] = 0.7 / (step + 2)
        exchange.finish()
    assert is_same_on_all_ranks(training.flat_parameters(net))


@on_ranks(2)
def test_inside_agreed_nothing_else_is_done() -> None:
    with made(every=4, delay=3) as (net, optimizer, exchange):
        train(net, optimizer, range(5))
        load = partial(exchange.load_state_dict, exchange.state_dict())
        calls: dict[str, Any] = {"state_dict": exchange.state_dict, "load_state_dict": load}
        calls |= {"finish": exchange.finish, "optimizer.step": optimizer.step}
        with exchange.agreed():
            for name, call in calls.items():
                why = "must not be called inside agreed(): the model is not this rank's"
                assert training.refusal(call)[1] == f"{name}() {why}"


def spoil(net: Any) -> None:
    if dist.get_rank() == 1:
        net.first.weight.data.fill_(math.nan)


@on_ranks(2)
def test_a_nan_that_is_saved_under_way_is_skipped_after_the_load() -> None:
    with made(every=4, delay=3) as (net, optimizer, exchange):
        train(net, optimizer, range(3))
        spoil(net)
        train(net, optimizer, range(3, 5))  # it is sent
        saved = exchange.state_dict()
    with made(every=4, delay=3) as (net, optimizer, exchange):
        exchange.load_state_dict(saved)
        train(net, optimizer, range(5, 12))
        exchange.finish()
        assert exchange.num_rounds >= 1 and bool(torch.isfinite(training.flat_parameters(net)).all())
        assert is_same_on_all_ranks(training.flat_parameters(net))


@on_ranks(2)
def test_close_waits_for_what_is_under_way() -> None:
    with training.listening() as said, made(every=4, fragments=4, delay=3) as (net, optimizer, _):
        train(net, optimizer, range(3))
    assert not said


@on_ranks(2)
def test_a_nan_takes_all_parts_back() -> None:
    for options in ({"every": 4, "delay": 2}, {"every": 4, "delay": 3, "fragments": 3}):
        with made(**options) as (net, optimizer, exchange):
            train(net, optimizer, range(5))
            spoil(net)
            train(net, optimizer, range(5, 17))
            assert exchange.total.num_skipped >= 1
            exchange.finish()
            assert bool(torch.isfinite(training.flat_parameters(net)).all())
            assert is_same_on_all_ranks(training.flat_parameters(net))


def test_a_failure_under_way_is_raised_by_the_next_steps(new_ranks: Ranks) -> None:
    said = new_ranks.run(fail_under_way)
    assert said == ["all_gather failed: a rank has stopped"] * len(said)


def fail_under_way() -> str:
    with made(every=4, delay=3) as (net, optimizer, exchange):
        train(net, optimizer, range(7))
        exchange._maker.land_all()
        failure = ClusterError("all_gather failed: a rank has stopped")
        exchange._steps.rank.collectives.all_gather = Mock(side_effect=failure)
        said = training.refusal(lambda: train(net, optimizer, range(7, 12)))
        assert training.refusal(exchange.state_dict)[0] == "ClusterError"
    return said[1]
