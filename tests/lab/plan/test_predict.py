"""What a step takes by each method; of updates, what a local step takes, and what to paste."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from regtopk.core.link import Link
from regtopk.lab.plan.costs import Calibration, Line
from regtopk.lab.plan.exchange import Workload
from regtopk.lab.plan.link import NCCL_HOP_S, WIRE_BYTES_PER_BYTE, Move, all_gather, all_reduce, all_to_all
from regtopk.lab.plan.methods import DENSE, FP16, POWERSGD, PlannedMethod, planned_methods
from regtopk.lab.plan.page import as_code
from regtopk.lab.plan.predict import FAST, Prediction, Situation, make_plan, predict
from regtopk.rounds import Rounds
from tests.lab.plan.made_up import calibration

REGTOPK = PlannedMethod("regtopk", 0.001, "float32")


def costs(lines: dict[str, Line] | None = None, device: str = "cpu") -> Calibration:
    """A machine on which work costs nothing, but for the given lines."""
    return calibration(lines, every={}, device=device)


def situation(bandwidth: float = 1e8, **options: Any) -> Situation:
    link = Link(bandwidth, options.pop("latency_s", 0.0), options.pop("compute_s", 0.1))
    return Situation(Workload.of_size(11_173_962), options.pop("num_workers", 4), link, **options)


def step_s(method: PlannedMethod, here: Situation, with_costs: Calibration) -> float:
    return predict(method, here, with_costs).step_time_s


def test_dense_takes_its_bytes_over_the_bandwidth() -> None:
    wire_s = 8 * 4 * 11_173_962 * 2 * 3 / 4 * WIRE_BYTES_PER_BYTE / 1e8
    hidden_s = 2 / 3 * 0.1 * 2 / 3  # behind backward: all but the last of three buckets
    assert step_s(DENSE, situation(), costs()) == pytest.approx(0.1 + wire_s - hidden_s)
    assert step_s(FP16, situation(), costs()) == pytest.approx(0.1 + wire_s / 2 - hidden_s)


def test_collectives_take_time_from_processors_and_none_from_gpus() -> None:
    lines = {"move all_reduce": {"messages": 1e-2}}
    on_cpu, on_gpu = (step_s(DENSE, situation(1e18), costs(lines, device)) for device in ("cpu", "H200"))
    assert on_cpu == pytest.approx(0.1 + 3 * 6e-2)
    assert on_gpu == pytest.approx(0.1 + 4 * NCCL_HOP_S)  # of the last bucket: two hops up a tree, two down


@pytest.mark.parametrize(("collective", "num_hops"), [(all_gather, 7), (all_to_all, 1), (all_reduce, 6)])
def test_nccl_gathers_by_rings_and_sums_by_trees(
    collective: Callable[[float, int], Move], num_hops: int
) -> None:
    took = collective(8, 8).on_link_s(Link(1e18, 0.001), "H200")
    assert took == pytest.approx(num_hops * (0.001 + NCCL_HOP_S))


def test_work_is_added_up() -> None:
    lines = {
        "ddp": {"numel": 1e-9},
        "pass": {"numel": 1e-9},
        "select float32": {"calls": 0.001, "numel": 1e-9, "numel beyond": 1e-9, "entries": 1e-6},
        "sparse float32": {"entries": 1e-7, "numel": 1e-9},
    }
    here, numel, k = situation(1e18), 11_173_962, 11_174
    expected = 0.1 + (1 + 2 + 1 + 1) * 1e-9 * numel + 1e-9 * (numel - 2**22) + 0.001 + 1e-6 * k + 1e-7 * 5 * k
    assert step_s(REGTOPK, here, costs(lines)) == pytest.approx(expected)
    dgc, consensus = (REGTOPK._replace(name=name) for name in ("dgc", "consensus"))
    assert step_s(dgc, here, costs(lines)) == pytest.approx(expected + 1e-9 * numel)  # its velocity
    assert step_s(consensus, here, costs({"pass": {"numel": 1e-9}})) == pytest.approx(0.1 + 4e-9 * numel)


def test_payload_is_the_size_of_the_message() -> None:
    assert predict(REGTOPK, situation(), costs()).exchange.payload_bytes == 61_428  # 184,284 for three others
    assert predict(DENSE, situation(), costs()).exchange.payload_bytes == 4 * 11_173_962
    factors = 2 * (11 * 1024 + 10 * 1024 + 672)  # of ten square matrices, a narrower one and 74 entries
    assert predict(POWERSGD, situation(), costs()).exchange.payload_bytes == 4 * (factors + 74)


def test_compression_pays_on_slow_links_alone() -> None:
    lines = {"select float32": {"numel": 2e-8}}  # 223 ms
    methods = [DENSE, FP16, REGTOPK]
    for bandwidth, pays in ((1e8, True), (1e11, False)):
        found = make_plan(situation(bandwidth), costs(lines), methods)
        assert found.pays == pays
        assert found.best.method == (REGTOPK if pays else DENSE)
    break_even = found.break_even_bits_per_s
    assert break_even is not None and 1e8 < break_even < 1e10
    below, above = (make_plan(situation(f * break_even), costs(lines), methods) for f in (0.99, 1.01))
    assert below.pays and not above.pays
    never = costs({"select float32": {"calls": 1e9}})
    always = costs({f"move {kind}": {"bytes": 1e-6} for kind in ("all_reduce", "all_reduce half")})
    found = make_plan(situation(), never, methods)
    assert found.break_even_bits_per_s is None and not found.pays
    found = make_plan(situation(), always, methods)
    assert found.break_even_bits_per_s == pytest.approx(FAST, rel=0.001) and found.pays
    assert not make_plan(situation(FAST), always, methods).pays


def test_of_equally_fast_steps_the_one_that_sends_most_is_best() -> None:
    denser, coarser = REGTOPK._replace(density=0.01), REGTOPK._replace(value_code="4bit")
    slow_work = costs({"select float32": {"calls": 10.0}, "select 4bit": {"calls": 10.0}})
    for methods, best in (([REGTOPK, coarser, denser], denser), ([coarser, REGTOPK], REGTOPK)):
        assert make_plan(situation(1e10), slow_work, methods).best.method == best


def test_a_method_without_a_record_is_predicted_but_advised_only_if_there_is_no_other() -> None:
    sparser = REGTOPK._replace(density=0.0001)
    found = make_plan(situation(1e5), costs(), [DENSE, sparser, REGTOPK])
    assert min(found.predictions, key=lambda p: p.step_time_s).method == sparser
    assert found.best.method == REGTOPK and found.best.relative_steps is not None
    alone = make_plan(situation(1e5), costs(), [DENSE, sparser])
    assert alone.best.method == sparser and alone.best.relative_steps is None


def test_the_time_to_a_loss_counts_not_that_of_a_step() -> None:
    """Ours is made to take a tenth more per step than PowerSGD, which needs a fifth more steps with AdamW."""
    fragments = PlannedMethod("topk:impute=0.35", 0.01, "4bit", Rounds("updates", 2, fragments=2))
    here = situation(1e8, optimizer="adamw")
    powersgd, ours = (predict(method, here, costs()) for method in (POWERSGD, fragments))
    passes = {"numel": 2 * (1.1 * powersgd.step_time_s - ours.step_time_s) / (3 * here.workload.numel)}
    assert passes["numel"] > 0
    found = make_plan(here, costs({"pass": passes}), [DENSE, POWERSGD, fragments])
    powersgd, ours = found.predictions[1:]
    assert powersgd.step_time_s < ours.step_time_s and found.best == ours
    assert found.speedup_to_loss(powersgd) < found.speedup_to_loss(ours)


def test_one_row_per_method_dense_first_then_by_time_to_a_loss_then_without_a_record() -> None:
    labels = ["topk", "regtopk", "consensus", "dgc", "dense", "topk:impute=0.5"]
    rows = make_plan(situation(), costs(), planned_methods(labels=labels)).best_by_label()
    assert rows[0].method == DENSE
    recorded = [p.time_to_loss for p in rows[1:] if p.relative_steps is not None]
    others = [p.step_time_s for p in rows[1:] if p.relative_steps is None]
    assert recorded == sorted(recorded) and others == sorted(others) and others
    assert [p.time_to_loss for p in rows[1:]] == recorded + others
    found = [p.method.label for p in rows]
    assert len(found) == len(set(found)) and "dense, coded" in found


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


def test_messages_hide_the_word_that_a_receiver_is_ready() -> None:
    short, long = all_reduce(8, 8), all_reduce(8e7, 8)
    link, no_latency = Link(1e8, 0.02), Link(1e8)
    assert short.on_link_s(link, "cpu") - short.on_link_s(no_latency, "cpu") == pytest.approx(2 * 14 * 0.02)
    assert long.on_link_s(link, "cpu") - long.on_link_s(no_latency, "cpu") == pytest.approx(14 * 0.02)


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
    coded = as_code(gradients._replace(index_code="rice"))
    assert coded.endswith("RegTopK(density=0.001), index_code='rice')")
