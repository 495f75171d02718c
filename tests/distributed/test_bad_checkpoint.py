"""Saved states that do not fit: refused as a whole, and the exchange is as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import regtopk
from regtopk.errors import StateError
from tests.distributed.ranks import Ranks
from tests.distributed.training import algorithm_state, listening, make_net, refusal, same

REGTOPK = regtopk.RegTopK(density=0.1)


def saved_by(net: nn.Module, algorithm: Any = REGTOPK, **options: Any) -> dict[str, Any]:
    """The state after one step of another model or algorithm."""
    exchange = regtopk.Exchange(net, algorithm, **options)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(dist.get_rank()))
    exchange.step()
    return exchange.state_dict()


def another_layer() -> dict[str, Any]:
    net = make_net()
    net.middle = nn.Linear(40, 21)
    return saved_by(net)


def one_layer_less() -> dict[str, Any]:
    net = make_net()
    del net.last
    return saved_by(net)


def one_layer_more() -> dict[str, Any]:
    net = make_net()
    net.top = nn.Linear(2, 1)
    return saved_by(net)


def of_the_other_rank() -> dict[str, Any]:
    saved = saved_by(make_net())
    return {**saved, "workers": {str(1 - dist.get_rank()): saved["workers"][str(dist.get_rank())]}}


def without(*path: Any) -> dict[str, Any]:
    """A state from which something of this rank's is missing."""
    saved = saved_by(make_net())
    holder = saved["workers"][str(dist.get_rank())]
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    return saved


# What is loaded, and how the error begins.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "another model": (
        another_layer,
        "parameters of the saved state must be this model's: expected 'middle.weight' of shape (20, 40), got "
        "'middle.weight' of shape (21, 40)",
    ),
    "a smaller model": (one_layer_less, "parameters of the saved state must be this model's 8, got 6: "),
    "a larger model": (
        one_layer_more,
        "parameters of the saved state must be this model's 8, got 10: the first without a partner is "
        "'top.weight'",
    ),
    "another algorithm": (
        lambda: saved_by(make_net(), regtopk.TopK(density=0.1)),
        "algorithm must be that of the saved state, 'topk', got 'regtopk'",
    ),
    "another skip": (
        lambda: saved_by(make_net(), skip=lambda name, p: name == "last.bias"),
        "skip must be that of the saved state, ['last.bias'], got []",
    ),
    "other ranks, not all there": (
        lambda: {**saved_by(make_net()), "weights": [0.2, 0.3, 0.5]},
        "the saved state of 3 ranks must hold rank(s) {missing} to be loaded on rank {rank} of 2 with these "
        "weights: gather it, or merge the rank files (regtopk.merge_state_dicts)",
    ),
    "the other rank's file": (of_the_other_rank, "the saved state of 2 ranks must hold rank(s) [{rank}] to "),
    "another format": (
        lambda: {**saved_by(make_net()), "format": 99},
        "format of the saved state must be 1, got 99",
    ),
    "other keys": (
        lambda: {"state": 1},
        "a saved exchange must hold ['algorithm', 'format', 'groups', 'num_steps', 'parameters', 'skip', "
        "'weights', 'workers'], got ['state']",
    ),
    "no dict": (lambda: [1], "a saved exchange must hold ['algorithm', "),
    "other groups": (
        lambda: {**saved_by(make_net()), "groups": [["last.bias"]]},
        "groups of the saved state must hold each of the 8 parameters once, got 1 groups of 1 names",
    ),
    "a field missing": (
        lambda: without("entries", "last.bias", "residual"),
        "state of parameter 'last.bias' of rank {rank} must hold {{'residual': (3,)}}, got {{}}",
    ),
    "a field of a group missing": (
        lambda: without("groups", 0, "own"),
        "state of bucket 0 of rank {rank} must hold ['aggregate', 'indices', 'own'], got ['aggregate', "
        "'indices']",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_as_a_whole(two_ranks: Ranks, case: str) -> None:
    for rank, found in enumerate(two_ranks.run(load_what_does_not_fit, case)):
        missing = [n for n in range(3) if n != rank]
        start = CASES[case][1].format(rank=rank, missing=missing)
        assert found[0] == "StateError" and found[1][: len(start)] == start


def load_what_does_not_fit(case: str) -> tuple[str, str]:
    net = make_net()
    exchange = regtopk.Exchange(net, REGTOPK)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    exchange.step()
    before = algorithm_state(exchange)
    saved = CASES[case][0]()
    refused = refusal(lambda: exchange.load_state_dict(saved))
    assert same(algorithm_state(exchange), before)
    exchange.step()
    return refused


def test_rank_files_of_different_moments_are_not_merged(two_ranks: Ranks) -> None:
    parts = two_ranks.run(save_at_different_steps)
    differ = r"^rank states must come from one moment of one run: num_steps differs between them$"
    with pytest.raises(StateError, match=differ):
        regtopk.merge_state_dicts(parts)
    with pytest.raises(StateError, match=r"^parts must hold at least one rank's state, got none$"):
        regtopk.merge_state_dicts([])
    with pytest.raises(StateError, match=r"^a saved exchange must hold .*, got \[\]$"):
        regtopk.merge_state_dicts([parts[0], {}])


def save_at_different_steps() -> dict[str, Any]:
    net = make_net()
    exchange = regtopk.Exchange(net, REGTOPK)
    saved = []
    for _ in range(2):
        exchange.step()  # missing gradients count as zero
        saved.append(exchange.state_dict())
    return saved[dist.get_rank()]


def load_with_other_options() -> tuple[list[str], int]:
    """What rank 0 logs when the density has changed, and with how many steps it goes on."""
    exchange = regtopk.Exchange(make_net(), regtopk.RegTopK(density=0.2))
    saved = saved_by(make_net())
    with listening() as told:
        exchange.load_state_dict(saved)
    return told, exchange.num_steps


def test_other_options_are_taken_and_said_once(two_ranks: Ranks) -> None:
    (told, num_steps), silent = two_ranks.run(load_with_other_options)
    assert num_steps == 1 and silent == ([], 1)
    (line,) = told
    assert line.startswith("goes on with other options: {'density': 0.2") and "'density': 0.1" in line
