"""Plans of exchanges of updates: what a local step takes, and what to paste."""

from dataclasses import replace
from typing import Any

import pytest

from regtopk.core.link import Link
from regtopk.lab.method import Method
from regtopk.lab.plan.exchange import Workload
from regtopk.lab.plan.link import all_gather, all_reduce
from regtopk.lab.plan.methods import PlannedMethod
from regtopk.lab.plan.page import as_code
from regtopk.lab.plan.predict import Prediction, Situation, predict
from regtopk.rounds import Rounds
from tests.lab.plan.made_up import calibration

COSTS = calibration()
COMPUTE_S = 0.3
HERE = Situation(Workload.of_size(10**7), 4, Link(1e8, 0.001, COMPUTE_S))


def method(name: str = "topk", every: int = 1, **options: Any) -> PlannedMethod:
    turns = {name: options.pop(name) for name in ("outer", "delay", "fragments") if name in options}
    return PlannedMethod(name, 0.01, "4bit", Rounds("updates", every, **turns))._replace(**options)


def predicted(planned: PlannedMethod, here: Situation = HERE) -> Prediction:
    return predict(planned, here, COSTS)


def test_a_local_step_is_the_computation_and_its_share_of_a_round() -> None:
    once, twice, rarely = (predicted(method(every=n)) for n in (1, 2, 16))
    round_s = once.step_time_s - COMPUTE_S
    assert twice.step_time_s == pytest.approx(COMPUTE_S + round_s / 2)
    assert rarely.step_time_s == pytest.approx(COMPUTE_S + round_s / 16)
    payload_bytes = once.exchange.payload_bytes
    assert rarely.exchange.bytes_per_step == once.exchange.bytes_per_step / 16 == payload_bytes / 16


def test_latency_counts_once_a_round() -> None:
    far, farther = (replace(HERE, link=Link(1e8, latency_s, COMPUTE_S)) for latency_s in (0.1, 0.2))
    for n in (1, 4):
        near_s, far_s = (predicted(method(every=n), there).step_time_s for there in (far, farther))
        # there and back: the agreement, which is direct, and the three hops of an all_gather
        assert far_s - near_s == pytest.approx(2 * 0.1 * (1 + 3) / n)


@pytest.mark.parametrize(
    ("collective", "num_bytes", "num_latencies"),
    [(all_reduce, 8, 2 * 14), (all_reduce, 8e7, 0), (all_gather, 8, 2), (all_gather, 8e7, 7)],
)
def test_long_messages_hide_latency(collective: Any, num_bytes: float, num_latencies: int) -> None:
    move, link, no_latency = collective(num_bytes, 8), Link(1e8, 0.02), Link(1e8)
    latency_s = move.on_link_s(link, "cpu") - move.on_link_s(no_latency, "cpu")
    assert latency_s == pytest.approx(num_latencies * 0.02, rel=1e-5, abs=1e-9)


def test_a_round_passes_over_the_model() -> None:
    def passes(planned: PlannedMethod) -> int:
        return [work.line for work in predicted(planned).exchange.work].count("pass")

    gradients = PlannedMethod("topk", 0.01, "4bit")
    assert [passes(each) for each in (gradients, method(), method(outer="nesterov"))] == [2, 3, 6]


def test_a_delay_hides_the_link_and_no_work() -> None:
    """The link of 1 Mbit/s takes seconds, of which a delay hides what is computed meanwhile."""
    slow = replace(HERE, link=Link(1e6, 0.01, COMPUTE_S))
    now, later, much_later = (predicted(method(every=16, delay=n), slow).step_time_s for n in (0, 2, 15))
    assert now - later == pytest.approx(2 * COMPUTE_S / 16)
    assert COMPUTE_S < much_later < later
    fast = replace(HERE, link=Link(1e12, 0.0, COMPUTE_S))
    times = [predicted(method(every=16, delay=n), fast).step_time_s for n in (0, 15)]
    assert times[1] == pytest.approx(times[0], rel=1e-3)


def test_fragments_pay_the_latency_of_each() -> None:
    small = Workload.of_size(10**5)  # all messages are short enough to go to everybody at once
    far, near = (replace(HERE, workload=small, link=Link(1e12, s, COMPUTE_S)) for s in (0.1, 0.0))
    whole, parts = (predicted(method(every=4, fragments=n), far) for n in (1, 4))
    waits = [p.step_time_s - predicted(p.method, near).step_time_s for p in (whole, parts)]
    assert waits[1] == pytest.approx(4 * waits[0])
    assert parts.exchange.payload_bytes == pytest.approx(whole.exchange.payload_bytes, rel=0.1)


TOPK = "regtopk.TopK(density=0.01, value_code='4bit'"
DILOCO = method("dense", 16, value_code="float32", density=1.0, outer="nesterov")
NESTEROV = "outer=lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)"


@pytest.mark.parametrize(
    ("planned", "arguments"),
    [
        (method(every=4, delay=1, fragments=2), f"{TOPK}), every=4, delay=1, fragments=2"),
        (method("topk:impute=0.35"), f"{TOPK}, impute=0.35), every=1"),
        (DILOCO, f"regtopk.Dense(), every=16, {NESTEROV}"),
    ],
)
def test_the_line_to_paste(planned: PlannedMethod, arguments: str) -> None:
    assert as_code(planned) == f"exchange = regtopk.UpdateExchange(model, optimizer, {arguments})"
    gradients = PlannedMethod("regtopk", 0.001, "float32")
    assert as_code(gradients) == "exchange = regtopk.attach(model, regtopk.RegTopK(density=0.001))"
    coded = PlannedMethod.of(Method.parse("regtopk:index_code=rice"), 0.001, "float32")
    assert as_code(coded).endswith("RegTopK(density=0.001), index_code='rice')")
    assert coded.label == "regtopk:index_code=rice"  # a table has both
