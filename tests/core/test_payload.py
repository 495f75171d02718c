"""What an algorithm counts of its own requests is what the simulator counts."""

import pytest
import torch

from regtopk.core.algorithm import converse
from regtopk.core.codes import INDEX_CODES
from regtopk.core.payload import payload_bytes
from regtopk.core.requests import Broadcast, Gather, Request
from regtopk.core.traffic import Traffic
from regtopk.core.worker import Layout, Worker
from regtopk.simulate.driver import SimulatedDriver
from tests.algorithms.cases import CASES, LAYOUT, Case, J, random_grads

WEIGHTS = (0.5, 0.0, 0.3, 0.2)


@pytest.mark.parametrize("index_code", INDEX_CODES)
@pytest.mark.parametrize("case", [case for case in CASES if case.is_first], ids=str)
def test_a_conversation_counts_as_the_simulator_counts_it(case: Case, index_code: str) -> None:
    algorithm, worker = case.make(value_code="4bit"), a_batch(LAYOUT, index_code)
    traffic = Traffic.zeros(4)
    driver = SimulatedDriver(traffic, WEIGHTS, index_code)
    counted = torch.zeros(4, dtype=torch.int64)

    def answer(request: Request) -> object:
        nonlocal counted
        counted = counted + payload_bytes(request, worker)
        return driver.answer(request)

    converse(algorithm.exchange(random_grads(1)[0], algorithm.init(worker), worker), answer)
    assert counted.tolist() == traffic.payload_bytes.tolist()


@pytest.mark.parametrize(
    "request_",
    [
        Gather(torch.ones(4, 5), torch.tensor([5, 3, 0, 1])),
        Gather(torch.arange(5).expand(4, 5), numel=J),
        Gather(torch.arange(5).expand(4, 5)),
        Broadcast(torch.ones(4, 5, dtype=torch.float64), 2),
        Broadcast(torch.arange(5).expand(4, 5), 3, J),
    ],
    ids=lambda request: type(request).__name__,
)
def test_requests_that_no_algorithm_makes_count_too(request_: Request) -> None:
    traffic = Traffic.zeros(4)
    SimulatedDriver(traffic, WEIGHTS, "elias-fano").answer(request_)
    counted = payload_bytes(request_, a_batch(LAYOUT, "elias-fano"))
    assert counted.tolist() == traffic.payload_bytes.tolist()


def a_batch(layout: Layout, index_code: str) -> Worker:
    return Worker(
        weight=torch.tensor(WEIGHTS).unsqueeze(-1),
        index=torch.arange(4).unsqueeze(-1),
        num_workers=4,
        step=0,
        layout=layout,
        batch_shape=(4,),
        idle=(1,),
        index_code=index_code,
    )
