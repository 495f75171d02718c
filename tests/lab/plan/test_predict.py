from collections.abc import Callable
from typing import Any

import pytest

from regtopk.core.link import Link
from regtopk.lab.plan.costs import Calibration, Line
from regtopk.lab.plan.exchange import Workload
from regtopk.lab.plan.link import NCCL_HOP_S, WIRE_BYTES_PER_BYTE, Move, all_gather, all_reduce, all_to_all
from regtopk.lab.plan.methods import DENSE, FP16, POWERSGD, PlannedMethod, planned_methods
from regtopk.lab.plan.predict import FAST, Situation, make_plan, predict
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
