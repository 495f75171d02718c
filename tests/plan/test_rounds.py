"""What the plan says a step asks for, against what the real driver does among echoes."""

from functools import partial
from typing import Any

import pytest
import torch

from regtopk.algorithms import ALGORITHMS
from regtopk.core.algorithm import converse
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.driver import answer
from regtopk.plan import rounds
from regtopk.plan.cases import CODES, make_algorithm, planned_algorithms
from regtopk.plan.echo import echo_rank
from regtopk.plan.rounds import Asked, Collective, moves_of, payload_bytes, requests_of

NUMEL, K = 2**16, 2**10  # echoes need regions of equal size
EXACT = [name for name in planned_algorithms() if name not in rounds.RAGGED and name != "atomo-svd"]


def run(name: str, code: str, num_workers: int, collective: Any) -> tuple[Any, list[tuple[str, int]]]:
    """A step of an algorithm: what it counted, and the collectives it called."""
    layers = [(str(n), (128, 128), "linear") for n in range(NUMEL // 128**2)]
    weight = torch.tensor(1 / num_workers)
    worker = Worker(weight, torch.tensor(0), num_workers, 0, Layout.of_shapes(layers))
    algorithm = make_algorithm(name, K / NUMEL, code)
    rank: Any = echo_rank(num_workers, collective)
    torch.manual_seed(0)
    converse(algorithm.exchange(torch.randn(NUMEL), algorithm.init(worker), worker), partial(answer, rank))
    return rank.record, rank.collectives.calls


def planned(asked: list[Asked], num_workers: int, collective: Collective) -> list[tuple[str, float]]:
    """The plan's collectives, with their bytes as an echo counts them: of an all_gather, one message."""
    moves = [move for request in asked for move in moves_of(request, num_workers, collective)]
    own = {"all_gather": num_workers - 1, "broadcast": num_workers.bit_length() - 1, "all_to_all": 1}
    return [(move.kind, move.sent_bytes / own[move.kind]) for move in moves]


def test_every_algorithm_is_planned_but_the_oracle() -> None:
    assert set(ALGORITHMS) - set(planned_algorithms()) == {"global-topk"}


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("name", EXACT)
def test_messages_of_known_size(name: str, num_workers: int) -> None:
    for code in rounds.value_codes_of(name, CODES):
        record, calls = run(name, code, num_workers, "all_gather")
        asked = requests_of(name, NUMEL, K, num_workers, code)
        assert record.payload_bytes == sum(payload_bytes(a, num_workers, "all_gather") for a in asked)
        assert calls == planned(asked, num_workers, "all_gather")


@pytest.mark.parametrize("name", sorted(rounds.RAGGED))
def test_messages_whose_size_depends_on_the_gradient(name: str) -> None:
    code = rounds.value_codes_of(name, ("float32",))[0]
    record, calls = run(name, code, 4, "all_gather")
    (asked,) = requests_of(name, NUMEL, record.num_entries, 4, code)
    assert record.payload_bytes == payload_bytes(asked, 4, "all_gather")
    assert calls == planned([asked], 4, "all_gather")
    if name not in ("adacomp", "sidco"):  # which find their densities as they go
        assert 0.5 * K < record.num_entries < 2 * K  # the density it was planned with


def test_spectral_atomo_sends_about_what_is_planned() -> None:
    record, calls = run("atomo-svd", "float32", 2, "all_gather")
    asked = requests_of("atomo-svd", NUMEL, K, 2, "float32")
    assert [kind for kind, _ in calls] == [kind for kind, _ in planned(asked, 2, "all_gather")]
    assert record.payload_bytes == pytest.approx(sum(payload_bytes(a, 2, "split") for a in asked), rel=0.5)


@pytest.mark.parametrize("code", CODES)
def test_a_split_sum_moves_about_what_is_planned(code: str) -> None:
    num_workers = 4
    record, calls = run("topk", code, num_workers, "split")
    asked = requests_of("topk", NUMEL, K, num_workers, code)
    expected = planned(asked, num_workers, "split")
    assert [kind for kind, _ in calls] == [kind for kind, _ in expected]
    assert calls[0] == expected[0] and calls[2] == expected[2]  # the sizes that ranks tell one another
    assert calls[1][1] == pytest.approx(expected[1][1], rel=0.15)  # the pieces
    assert record.payload_bytes == pytest.approx(payload_bytes(asked[0], num_workers, "split"), rel=0.15)
    union = rounds.union(asked[0], num_workers)
    assert calls[3][1] < expected[3][1] < 4.5 * calls[3][1]  # echoes choose the same: their union is smaller
    assert 3.9 * K < union < 4 * K


def test_the_union_of_supports() -> None:
    assert rounds.union(Asked("sparse", 10, 100), 1) == pytest.approx(10)
    assert rounds.union(Asked("sparse", 10, 100), 2) == pytest.approx(19)
    assert rounds.union(Asked("sparse", 100, 100), 3) == 100


def test_collectives_move_what_rings_and_trees_do() -> None:
    assert rounds.all_reduce(1000, 4) == ("all_reduce", 6, 6, 1500)
    assert rounds.all_gather(1000, 4) == ("all_gather", 3, 3, 3000)
    assert rounds.all_to_all(250, 4) == ("all_to_all", 3, 1, 750)
    assert rounds.broadcast(1000, 5) == ("broadcast", 3, 3, 3000)


def test_memory_grows_with_workers_but_not_when_split() -> None:
    asked = Asked("sparse", 10**5, 10**8)
    gathered = [rounds.memory_bytes(asked, n, "all_gather") for n in (2, 1024)]
    split = [rounds.memory_bytes(asked, n, "split") for n in (2, 1024)]
    assert gathered[1] > 100 * gathered[0]
    assert split[1] < 0.05 * gathered[1]
