"""What the plan says a step asks for, against what the real driver does when all ranks are alike."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk.algorithms import ALGORITHMS
from regtopk.core.codes import full_message_bytes
from regtopk.core.requests import DenseSum, Gather, SparseSum
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.requests.rank import SumBuffer
from regtopk.distributed.steps import driver
from regtopk.lab.plan import exchange
from regtopk.lab.plan.asked import make_algorithm, probe, takes
from regtopk.lab.plan.bench import Bench
from regtopk.lab.plan.cases import Echo, echo_rank
from regtopk.lab.plan.exchange import Exchange, answer
from regtopk.lab.plan.methods import CODES

NUMEL, K, N = 2**16, 2**10, 8  # copies need regions of equal size; probes have fewer workers
PLANNED = [name for name in ALGORITHMS if not probe(name, K / NUMEL, "float32").peeks]
RAGGED = [n for n in PLANNED if any(a.is_ragged for a in probe(n, K / NUMEL, "float32").requests)]


class Listing(Echo):
    """Lists the collectives that are called, each with its bytes."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self.calls: list[tuple[str, int]] = []

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.calls.append(("all_gather", tensor.nbytes))
        return super().all_gather(tensor)

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        self.calls.append(("all_to_all", sum(part.nbytes for part in parts[1:])))
        return super().all_to_all(parts, sizes)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        self.calls.append(("broadcast", tensor.nbytes))
        return super().broadcast(tensor, source)


def run(name: str, code: str, *, is_split: bool = False) -> tuple[Any, list[tuple[str, int]]]:
    """A step of an algorithm: what it counted, and the collectives it called."""
    layout = Layout.of_shapes([("", (256, 256), "linear")])
    worker = Worker(torch.tensor(1 / N), torch.tensor(0), N, 0, layout)
    algorithm = make_algorithm(name, K / NUMEL, code)
    listing = Listing(N)
    rank = echo_rank(listing, Bench(torch.device("cpu")), is_split=is_split)
    torch.manual_seed(0)
    conversation = algorithm.exchange(torch.randn(NUMEL), algorithm.init(worker), worker)
    driver.converse(rank, [conversation], [SumBuffer()])
    return rank.record, listing.calls


def answers(name: str, code: str, k: int, *, is_split: bool = False) -> list[Exchange]:
    return [
        answer(asked.request, *asked.size(NUMEL, k, N), N, is_ragged=asked.is_ragged, is_split=is_split)
        for asked in probe(name, K / NUMEL, code).requests
    ]


def planned(answered: list[Exchange]) -> list[tuple[str, float]]:
    """The plan's collectives, with their bytes as the copies count them: of an all_gather, one message."""
    own = {"all_gather": N - 1, "broadcast": N.bit_length() - 1, "all_to_all": 1}
    return [(move.kind, move.sent_bytes / own[move.kind]) for each in answered for move in each.moves]


def test_only_an_algorithm_that_peeks_cannot_be_planned() -> None:
    assert set(ALGORITHMS) - set(PLANNED) == {"global-topk"}


@pytest.mark.parametrize("name", [name for name in PLANNED if name not in RAGGED])
def test_messages_of_known_size(name: str) -> None:
    for code in CODES if takes(name, "value_code") else CODES[:1]:
        own = probe(name, K / NUMEL, code).density
        record, calls = run(name, code)
        answered = answers(name, code, K if own is None else round(own * NUMEL))
        assert record.payload_bytes == sum(each.payload_bytes for each in answered)
        assert calls == planned(answered)


@pytest.mark.parametrize("name", RAGGED)
def test_messages_whose_size_depends_on_the_gradient(name: str) -> None:
    record, calls = run(name, "float32")
    answered = answers(name, "float32", record.num_entries)
    assert record.payload_bytes == sum(each.payload_bytes for each in answered)
    assert calls == planned(answered)


def test_what_is_asked_of_many_workers_and_long_vectors() -> None:
    """Consensus: proposals of ceil(k / N) entries of J, and a dense sum of k."""
    gather, dense = probe("consensus", 0.001, "4bit").requests
    assert isinstance(gather.request, Gather) and gather.size(10**9, 10**6, 96) == (10_417, 10**9)
    assert isinstance(dense.request, DenseSum) and dense.size(10**9, 10**6, 96)[0] == 10**6
    assert dense.request.code == "4bit"
    (candidates,) = probe("random-candidates", 0.001, "4bit").requests
    assert isinstance(candidates.request, SparseSum)
    assert candidates.size(10**9, 10**6, 96) == (10**6, 16 * 10**6)


def test_an_algorithm_that_listens_says_so() -> None:
    assert [name for name in PLANNED if probe(name, 0.01, "float32").listens] == ["fair-topk"]


def test_densities_that_nobody_chooses() -> None:
    assert probe("dense", 0.01, "float32").density == 1
    assert probe("adaptive", 0.5, "float32").density == 0.01  # of the algorithm it adapts by default
    assert probe("topk", 1e-9, "float32").density is None and probe("strom", 0.01, "float32").density is None


@pytest.mark.parametrize("code", CODES)
def test_a_split_sum_moves_about_what_is_planned(code: str) -> None:
    record, calls = run("topk", code, is_split=True)
    (answered,) = answers("topk", code, K, is_split=True)
    expected = planned([answered])
    assert [kind for kind, _ in calls] == [kind for kind, _ in expected]
    assert calls[0] == expected[0] and calls[2] == expected[2]  # the sizes that ranks tell one another
    assert calls[1][1] == pytest.approx(expected[1][1], rel=0.15)  # the pieces
    assert record.payload_bytes == pytest.approx(answered.payload_bytes, rel=0.15)
    assert calls[3][1] < expected[3][1] < 9 * calls[3][1]  # copies choose the same: their union is smaller


NOTHING = torch.empty(0, dtype=torch.int64)
SPARSE_SUM = SparseSum(SparseGradient(NOTHING, NOTHING.float(), 1), torch.ones(()))


def test_a_split_sum_is_of_the_union_of_the_supports() -> None:
    """10 of 100 entries, two workers that choose independently: 19 on average."""
    answered = answer(SPARSE_SUM, 10, 100, 2, is_split=True)
    assert answered.work[1].units["entries"] == pytest.approx(10 + 19)
    sums = full_message_bytes(10, 50, dtype=torch.float32, value_code="float32", index_code="elias-fano")
    assert answered.moves[3].sent_bytes == sums
    whole = answer(SPARSE_SUM, 100, 100, 3, is_split=True)
    assert whole.work[1].units["entries"] == 200


def test_collectives_move_what_rings_and_trees_do() -> None:
    assert exchange.all_reduce(1000, 4) == ("all_reduce", 6, 6, 1500)
    assert exchange.all_gather(1000, 4) == ("all_gather", 3, 1, 3000)  # sent to everybody at once
    assert exchange.all_gather(200_000, 4) == ("all_gather", 3, 3, 600_000)
    assert exchange.all_gather(1000, 1) == ("all_gather", 0, 0, 0)
    assert exchange.all_to_all(250, 4) == ("all_to_all", 3, 1, 750)
    assert exchange.broadcast(1000, 5) == ("broadcast", 3, 3, 3000)


def test_memory_grows_with_workers_but_not_when_split() -> None:
    gathered, split = (
        [answer(SPARSE_SUM, 10**5, 10**8, n, is_split=s).memory_bytes for n in (2, 1024)]
        for s in (False, True)
    )
    assert gathered[1] > 100 * gathered[0]
    assert split[1] < 0.05 * gathered[1]
