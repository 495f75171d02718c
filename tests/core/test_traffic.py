"""What a step counts: bytes and seconds."""

from contextlib import suppress

import pytest
import torch

from regtopk.core.algorithm import converse
from regtopk.core.codes import INDEX_CODES
from regtopk.core.requests import Request
from regtopk.core.timer import Timer
from regtopk.core.traffic import NAMES, Traffic, all_gather_bytes, all_reduce_bytes, payload_bytes
from regtopk.core.worker import Worker
from regtopk.simulate.driver import SimulatedDriver
from tests.algorithms.cases import CASES, LAYOUT, Case, random_grads

WEIGHTS = (0.5, 0.0, 0.3, 0.2)


def test_a_ring_all_gather_moves_all_messages_but_one() -> None:
    # worker n forwards all but its successor's, and receives all but its own
    sent, received = all_gather_bytes(torch.tensor([1, 20, 300]))
    assert sent.tolist() == [301, 21, 320] and received.tolist() == [320, 301, 21]
    assert [t.tolist() for t in all_gather_bytes(torch.tensor([[7], [9]]))] == [[[0], [0]], [[0], [0]]]


def test_a_ring_all_reduce_moves_nearly_two_vectors() -> None:
    assert [all_reduce_bytes(4000, n) for n in (1, 2, 4, 8)] == [0, 4000, 6000, 7000]


def test_counts_add_up_separately() -> None:
    none = torch.zeros(2, dtype=torch.int64)
    step = Traffic.of(torch.tensor([1, 2]), none, none, torch.tensor([5, 5]))
    total = Traffic.zeros(2) + step + step
    assert list(total.state_dict()) == list(NAMES)
    assert total.payload_bytes.tolist() == [2, 4] and total.num_entries.tolist() == [10, 10]
    assert total.sent_bytes.tolist() == [0, 0]
    assert step.payload_bytes.tolist() == [1, 2]
    copy = Traffic.from_state_dict(total.state_dict())
    assert copy.payload_bytes.tolist() == [2, 4] and copy.counts.data_ptr() != total.counts.data_ptr()


@pytest.mark.parametrize("index_code", INDEX_CODES)
@pytest.mark.parametrize("case", [case for case in CASES if case.is_first], ids=str)
def test_an_algorithm_counts_what_the_simulator_counts(case: Case, index_code: str) -> None:
    weight, index = torch.tensor(WEIGHTS).unsqueeze(-1), torch.arange(4).unsqueeze(-1)
    worker = Worker(weight, index, 4, 0, LAYOUT, (4,), idle=(1,), index_code=index_code)
    algorithm = case.make(value_code="4bit")
    driver = SimulatedDriver(worker)
    counted = torch.zeros(4, dtype=torch.int64)

    def answer(request: Request) -> object:
        nonlocal counted
        counted = counted + payload_bytes(request, worker)
        return driver.answer(request)

    converse(algorithm.exchange(random_grads(1)[0], algorithm.init(worker), worker), answer)
    assert counted.tolist() == driver.traffic.payload_bytes.tolist()


def test_an_inner_phase_does_not_count_twice() -> None:
    times = iter([0.0, 1.0, 3.0, 10.0, 20.0, 21.5])
    timer = Timer(torch.device("cpu"), lambda: next(times))
    with timer.phase("outer"), timer.phase("inner"):
        pass
    assert timer.seconds() == {"outer": 1.0 + 7.0, "inner": 2.0}
    with timer.phase("outer"):  # what lies between is nobody's
        pass
    assert timer.seconds() == timer.seconds() == {"outer": 9.5, "inner": 2.0}
    assert timer.seconds()["never"] == 0.0


def test_a_block_that_fails_is_counted() -> None:
    times = iter([0.0, 2.0])
    timer = Timer(torch.device("cpu"), lambda: next(times))
    with suppress(ValueError), timer.phase("work"):
        raise ValueError
    assert timer.seconds() == {"work": 2.0}
