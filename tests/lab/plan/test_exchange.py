"""What the plan says a step asks for, against what the real driver does when all ranks are alike."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk.core.worker import Layout, Worker
from regtopk.distributed.requests.rank import Rank, SumBuffer
from regtopk.distributed.steps import driver
from regtopk.distributed.steps.agreement import Agreement, Question
from regtopk.lab.method import Method
from regtopk.lab.plan.calibrate import Echo
from regtopk.lab.plan.exchange import Workload, answers_of, exchange_of
from regtopk.lab.plan.link import TOLD_BYTES
from regtopk.lab.plan.methods import CODES, PlannedMethod, planned_methods
from regtopk.simulate import Cluster
from tests.lab.plan.made_up import LINES

NUMEL, K, N = 2**16, 2**10, 8  # copies need regions of equal size
Calls = list[tuple[str, int]]


class Listing(Echo):
    """Lists the collectives that are called, each with its bytes."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(num_workers)
        self.calls = Calls()

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.calls.append(("all_gather", tensor.nbytes))
        return super().all_gather(tensor)

    def all_to_all(self, parts: Sequence[Tensor], sizes: list[int]) -> list[Tensor]:
        self.calls.append(("all_to_all", sum(part.nbytes for part in parts[1:])))
        return super().all_to_all(parts, sizes)

    def device_for_flags(self, device: torch.device) -> torch.device:
        return device


def run(method: PlannedMethod, num_workers: int = N) -> tuple[Any, Calls]:
    """The second step of an algorithm: what it counted, and the collectives it called."""
    weights = torch.full((num_workers,), 1 / num_workers)
    worker = Worker(weights[0], torch.tensor(0), num_workers, 0, Layout.of_shapes([("", (NUMEL,), "linear")]))
    algorithm = Method.parse(method.name).build(density=method.density, value_code=method.value_code)
    listing = Listing(num_workers)
    rank = Rank(listing, weights.double())
    torch.manual_seed(0)
    for _ in range(2):  # the first ones do not know how long messages are
        rank.begin(torch.device("cpu"))
        listing.calls.clear()
        conversation = algorithm.exchange(torch.randn(NUMEL), algorithm.init(worker), worker)
        driver.converse(rank, [conversation], [SumBuffer()])
    return rank.record, listing.calls


def planned(method: PlannedMethod, k: int, num_workers: int = N) -> list[tuple[str, float]]:
    """The plan's collectives, with their bytes as the copies count them: of an all_gather, one message."""
    own = {"all_gather": num_workers - 1, "all_to_all": 1}
    moves = [move for answer in answers_of(method, k, NUMEL, num_workers) for move in answer.moves]
    return [(move.kind, move.sent_bytes / own[move.kind]) for move in moves]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", ["topk", "topk:impute=0.35", "regtopk", "dgc", "consensus", "dense"])
def test_messages_of_known_size(name: str, code: str) -> None:
    density = 1.0 if name == "dense" else K / NUMEL
    method = PlannedMethod(name, density, code)
    record, calls = run(method)
    answers = answers_of(method, K, NUMEL, N)
    assert record.payload_bytes == sum(answer.payload_bytes for answer in answers)
    assert calls == planned(method, K)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", ["topk", "topk:impute=0.35"])
def test_a_split_sum_moves_about_what_is_planned(name: str, code: str) -> None:
    """With many entries of many workers, the library splits the sum by itself, and so does the plan."""
    method = PlannedMethod(name, 0.25, code)
    record, calls = run(method, 64)
    (answered,) = answers_of(method, NUMEL // 4, NUMEL, 64)
    expected = planned(method, NUMEL // 4, 64)
    assert answered.collective == "split" and [kind for kind, _ in calls] == [kind for kind, _ in expected]
    assert 1 < calls[0][1] / expected[0][1] < 1.5  # rows have room for the longest of some short pieces
    assert record.payload_bytes == pytest.approx(answered.payload_bytes, rel=0.15)
    assert calls[1][1] < expected[1][1] < 9 * calls[1][1]  # copies choose the same: their union is smaller


def test_imputation_tells_who_sent_each_entry_of_a_split_sum() -> None:
    plain, imputed = (
        answers_of(PlannedMethod(name, 0.25, "4bit"), NUMEL // 4, NUMEL, 64)[0].moves[-1]
        for name in ("topk", "topk:impute=0.35")
    )
    more_bytes = imputed.sent_bytes - plain.sent_bytes
    assert more_bytes == pytest.approx(63 * NUMEL / 64, rel=0.1)  # a byte per entry: how many sent it


@pytest.mark.parametrize("name", ["dense", "dense:sum_code=2bit", "consensus:sum_code=4bit"])
def test_sums_come_back_in_their_code(name: str) -> None:
    method, numel = PlannedMethod(name, 0.05, "2bit"), 2**16
    answers = answers_of(method, round(0.05 * numel), numel, 8)
    planned_bytes = sum(move.sent_bytes for answer in answers for move in answer.moves)
    cluster = Cluster(Method.parse(name).build(density=0.05, value_code="2bit"), num_workers=8)
    cluster.step(torch.randn(8, numel, generator=torch.Generator().manual_seed(0)))
    counted = float(cluster.last_step.received_bytes.double().mean())
    assert planned_bytes == pytest.approx(counted, rel=0.1)  # proposals overlap a little


@pytest.mark.parametrize("num_workers", [4, 64])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("name", ["topk:returned=0.01", "dgc:returned=0.05"])
def test_sums_that_come_back_in_part_move_what_is_planned(name: str, code: str, num_workers: int) -> None:
    """The counts hold all but the lengths and numbers of entries that owners are told."""
    method, numel = PlannedMethod(name, 0.02, code), 2**18
    answers = answers_of(method, round(0.02 * numel), numel, num_workers)
    moves = [move for answer in answers for move in answer.moves]
    assert [move.is_told for move in moves] == [True, False]
    algorithm = Method.parse(name).build(density=0.02, value_code=code)
    cluster = Cluster(algorithm, num_workers=num_workers)
    cluster.step(torch.randn(num_workers, numel, generator=torch.Generator().manual_seed(0)))
    counted = cluster.last_step
    received = sum(move.sent_bytes for move in moves) - TOLD_BYTES * (num_workers - 1)
    for moved in (counted.received_bytes, counted.sent_bytes):
        assert received == pytest.approx(float(moved.double().mean()), rel=0.02)
    payload = sum(answer.payload_bytes for answer in answers)
    assert payload == pytest.approx(float(counted.payload_bytes.double().mean()), rel=0.02)


def test_owners_are_told_sizes_and_all_hear_what_comes_back() -> None:
    method = PlannedMethod("topk:returned=0.05", K / NUMEL, "4bit")
    record, calls = run(method)
    expected = planned(method, K)
    assert [kind for kind, _ in expected] == [kind for kind, _ in calls] == ["all_to_all", "all_gather"]
    assert 0 < calls[0][1] - expected[0][1] < (N - 1) * 300  # room for more than these 128 entries
    assert calls[1] == expected[1]
    assert record.payload_bytes == pytest.approx(
        sum(answer.payload_bytes for answer in answers_of(method, K, NUMEL, N)), rel=0.1
    )


def test_the_agreement_is_as_long_as_what_ranks_tell_one_another() -> None:
    listing = Listing(4)
    Agreement(listing, None, Question(3, ("weight", "bias"), (7,)), torch.tensor(True))
    (move, *_) = exchange_of(PlannedMethod("topk", 0.01, "float32"), Workload.of_size(1000), 4).moves
    assert listing.calls == [("all_gather", move.sent_bytes / 3)]


def test_all_that_is_planned_has_a_cost_in_a_calibration() -> None:
    updates = [
        "topk:impute=0.35:exchange=updates:every=2",
        "topk:returned=0.01",
        "dense:exchange=updates:outer=nesterov",
    ]
    asked = set()
    for method in planned_methods((0.01, 0.1), ["topk", "regtopk", "dgc", "consensus", "dense", *updates]):
        for num_workers in (2, 512):
            exchange = exchange_of(method, Workload.of_size(10**6), num_workers)
            asked |= {work.line for work in exchange.work} | {f"move {move.kind}" for move in exchange.moves}
    assert asked <= LINES


def test_powersgd_sends_factors_of_what_is_large_enough() -> None:
    workload = Workload.of_shapes([(512, 512), (8, 3, 5, 5), (3, 3), (512,)])
    left, right = 4 * 2 * (512 + 8), 4 * 2 * (512 + 75)
    assert workload == (512**2 + 600 + 9 + 512, 3, (4 * (9 + 512), left, right))
    shapes = [(1024, 1024), (1024, 1024), (1024, 3), (5,)]  # a size alone is thought of as square matrices
    assert Workload.of_size(2 * 1024**2 + 3 * 1024 + 5) == Workload.of_shapes(shapes)
    assert Workload.of_size(7) == (7, 0, (28, 0, 0))
