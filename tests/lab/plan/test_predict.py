from typing import Any

import pytest

from regtopk.algorithms import ALGORITHMS
from regtopk.core.link import Link
from regtopk.errors import StateError
from regtopk.lab.plan.costs import Calibration, Line
from regtopk.lab.plan.methods import DENSE, FP16, POWERSGD, Method, planned_methods
from regtopk.lab.plan.predict import WIRE_BYTES_PER_BYTE, Situation, find_break_even, make_plan, predict
from regtopk.lab.plan.workload import Workload
from regtopk.rounds import Rounds
from tests.lab.plan.made_up import calibration

REGTOPK = Method("regtopk", 0.001, "float32", "all_gather")
PLENTY = 1e15


def costs(lines: dict[str, Line] | None = None, device: str = "cpu") -> Calibration:
    """A machine on which work costs nothing, but for the given lines."""
    return calibration(lines, every={}, device=device)


def situation(bandwidth: float = 1e8, **options: Any) -> Situation:
    link = Link(bandwidth, options.pop("latency_s", 0.0), options.pop("compute_s", 0.1))
    workload = options.pop("workload", Workload.of_size(11_173_962))
    return Situation(workload, options.pop("num_workers", 4), link, **options)


def step_s(method: Method, here: Situation, with_costs: Calibration) -> float:
    return predict(method, here, with_costs).step_time_s


def test_dense_takes_its_bytes_over_the_bandwidth() -> None:
    wire_s = 8 * 4 * 11_173_962 * 2 * 3 / 4 * WIRE_BYTES_PER_BYTE / 1e8
    hidden_s = 2 / 3 * 0.1 * 2 / 3  # behind backward: all but the last of three buckets
    assert step_s(DENSE, situation(), costs()) == pytest.approx(0.1 + wire_s - hidden_s)
    assert step_s(FP16, situation(), costs()) == pytest.approx(0.1 + wire_s / 2 - hidden_s)


def test_work_of_the_processor_hides_only_where_another_trains() -> None:
    lines = {"move all_reduce": {"messages": 1e-2}}
    on_cpu, on_gpu = (step_s(DENSE, situation(1e12), costs(lines, device)) for device in ("cpu", "H200"))
    assert on_cpu == pytest.approx(0.1 + 3 * 6e-2, rel=0.01)
    assert on_gpu == pytest.approx(on_cpu - 2 / 3 * 0.1 * 2 / 3, rel=0.01)


def test_latency_counts_once_a_hop() -> None:
    slow, fast = (step_s(REGTOPK, situation(latency_s=x), costs()) for x in (0.01, 0.0))
    assert slow - fast == pytest.approx((1 + 1) * 0.01)  # the agreement, and the all_gather


def test_work_is_added_up() -> None:
    lines = {
        "ddp": {"numel": 1e-9},
        "exchange": {"numel": 2e-9},
        "select regtopk": {"calls": 0.001, "numel": 1e-9, "numel beyond": 1e-9, "entries": 1e-6},
        "encode float32": {"entries": 1e-6},
        "decode float32": {"entries": 1e-7, "numel": 1e-9},
    }
    here, numel, k = situation(1e18), 11_173_962, 11_174
    expected = 0.1 + 5e-9 * numel + 1e-9 * (numel - 2**22) + 0.001 + 2e-6 * k + 1e-7 * 4 * k
    assert step_s(REGTOPK, here, costs(lines)) == pytest.approx(expected)


def test_payload_is_the_size_of_the_message() -> None:
    assert predict(REGTOPK, situation(), costs()).exchange.payload_bytes == 61_428  # 184,284 for three others
    assert predict(DENSE, situation(), costs()).exchange.payload_bytes == 4 * 11_173_962
    matrices = Workload(((512, 512), (512, 512), (512,)))
    payload = predict(POWERSGD, situation(workload=matrices), costs()).exchange.payload_bytes
    assert payload == 4 * (2 * 2 * 1024 + 512)


def test_every_method_can_be_predicted_for_few_and_many_workers() -> None:
    methods = planned_methods(every=True)
    assert len(methods) == len(set(methods)) > 200
    assert {m.name for m in methods} >= {"dense", "fp16", "powersgd", "regtopk", "consensus", "sketch"}
    for num_workers in (2, 3, 4096):
        for method in methods:
            assert step_s(method, situation(num_workers=num_workers), costs()) > 0


def test_all_gather_stops_scaling_and_a_split_does_not() -> None:
    split = REGTOPK._replace(collective="split")
    few, many = situation(num_workers=4), situation(num_workers=512)
    assert step_s(REGTOPK, few, costs()) < step_s(split, few, costs())
    assert step_s(REGTOPK, many, costs()) > step_s(split, many, costs())


def test_compression_pays_on_slow_links_alone() -> None:
    lines = {"select regtopk": {"numel": 2e-8}}  # 223 ms
    methods = [DENSE, FP16, REGTOPK]
    for bandwidth, pays in ((1e8, True), (1e11, False)):
        found = make_plan(situation(bandwidth), costs(lines), methods, PLENTY)
        assert found.pays == pays
        assert found.best.method == (REGTOPK if pays else DENSE)
    break_even = found.break_even_bits_per_s
    assert break_even is not None and 1e8 < break_even < 1e10
    below, above = (make_plan(situation(f * break_even), costs(lines), methods, PLENTY) for f in (0.99, 1.01))
    assert below.pays and not above.pays


def test_a_break_even_at_no_and_at_every_bandwidth() -> None:
    never = costs({"select regtopk": {"calls": 1e9}})
    always = costs({"move all_reduce": {"bytes": 1e-6}, "move all_reduce half": {"bytes": 1e-6}})
    assert find_break_even([DENSE, FP16, REGTOPK], situation(), never) is None
    assert find_break_even([DENSE, FP16, REGTOPK], situation(), always) is None
    assert not make_plan(situation(), never, [DENSE, FP16, REGTOPK], PLENTY).pays
    assert make_plan(situation(), always, [DENSE, FP16, REGTOPK], PLENTY).pays


def test_of_equally_fast_steps_the_one_that_sends_most_is_best() -> None:
    denser, coarser = REGTOPK._replace(density=0.01), REGTOPK._replace(value_code="2bit")
    slow_work = costs({"select regtopk": {"calls": 10.0}})
    found = make_plan(situation(1e10), slow_work, [REGTOPK, coarser, denser], PLENTY)
    assert found.best.method == denser
    found = make_plan(situation(1e10), slow_work, [coarser, REGTOPK], PLENTY)
    assert found.best.method == REGTOPK


def test_a_method_without_a_record_is_predicted_but_advised_only_if_there_is_no_other() -> None:
    randomk = Method("randomk", 0.001, "float32", "split")
    found = make_plan(situation(1e5), costs(), [DENSE, randomk, REGTOPK], PLENTY)
    assert min(found.predictions, key=lambda p: p.step_time_s).method == randomk
    assert found.best.method == REGTOPK and found.best.relative_steps is not None
    alone = make_plan(situation(1e5), costs(), [DENSE, randomk], PLENTY)
    assert alone.best.method == randomk and alone.best.relative_steps is None


def test_the_time_to_a_loss_counts_not_that_of_a_step() -> None:
    """Ours is made to take a tenth more per step than PowerSGD, which needs a fifth more steps with AdamW."""
    fragments = Method("topk:impute=0.35", 0.01, "4bit", "all_gather", Rounds("updates", 2, fragments=2))
    here = situation(1e8, optimizer="adamw")
    powersgd, ours = (predict(method, here, costs()) for method in (POWERSGD, fragments))
    passes = {"numel": 2 * (1.1 * powersgd.step_time_s - ours.step_time_s) / here.workload.numel}
    assert passes["numel"] > 0
    found = make_plan(here, costs({"updates none": passes}), [DENSE, POWERSGD, fragments], PLENTY)
    powersgd, ours = found.predictions[1:]
    assert powersgd.step_time_s < ours.step_time_s and found.best == ours
    assert found.speedup(powersgd) > found.speedup(ours)
    assert found.speedup_to_loss(powersgd) < found.speedup_to_loss(ours)


def test_what_was_not_measured_is_left_out() -> None:
    older = costs()
    del older.lines["select dgc"], older.lines["split decode 4bit"]
    found = make_plan(situation(), older, planned_methods(), PLENTY)
    assert {m.name for m in found.not_measured} == {"topk", "regtopk", "dgc"}
    assert all(m.name == "dgc" or m[2:4] == ("4bit", "split") for m in found.not_measured)
    assert {p.method.name for p in found.predictions} == {m.name for m in planned_methods()} - {"dgc"}
    del older.lines["move all_reduce"]
    with pytest.raises(StateError, match="calibration must hold the costs of 'move all_reduce', got only"):
        make_plan(situation(), older, planned_methods(), PLENTY)


def test_by_default_what_one_would_try_first_is_planned() -> None:
    names = {method.name for method in planned_methods()}
    assert names == {"dense", "fp16", "powersgd", "topk", "regtopk", "consensus", "dgc"}
    assert {m.name for m in planned_methods(every=True)} == {*ALGORITHMS, "fp16", "powersgd"} - {
        "global-topk"
    }


def test_one_row_per_method_dense_first_then_by_time_to_a_loss_then_without_a_record() -> None:
    found = make_plan(situation(), costs(), planned_methods(every=True), PLENTY)
    rows = found.best_by_label()
    assert rows[0].method == DENSE
    recorded = [p.time_to_loss for p in rows[1:] if p.relative_steps is not None]
    others = [p.step_time_s for p in rows[1:] if p.relative_steps is None]
    assert recorded == sorted(recorded) and others == sorted(others)
    assert [p.time_to_loss for p in rows[1:]] == recorded + others
    labels = [p.method.label for p in rows]
    assert len(labels) == len(set(labels)) and "dense, coded" in labels
