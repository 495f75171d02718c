"""How many steps methods need: from records, and from what sends less where there is none."""

import json
from math import inf
from typing import Any

from benchmarks import steps_to_target
from regtopk.lab.plan.learning import LEARNED, about, relative_steps
from regtopk.lab.plan.methods import DENSE, FP16, POWERSGD, PlannedMethod
from regtopk.rounds import Rounds

TOPK = PlannedMethod("topk", 0.001, "float32")
UPDATES = PlannedMethod("topk:impute=0.35", 0.01, "4bit", Rounds("updates", 2))


def recorded(optimizer: str, **key: Any) -> float:
    rows = json.loads(LEARNED.read_text())[optimizer]["methods"]
    (row,) = [row for row in rows if key.items() <= row.items()]
    return float(row["relative_steps"])


def test_a_crossing_lies_between_two_evaluations() -> None:
    assert steps_to_target.crossing([(0, 10.0), (100, 50.0), (200, 70.0)], 60.0) == 150
    assert steps_to_target.crossing([(200, 1.0), (0, 4.0), (100, 2.0)], 1.5) == 150
    assert steps_to_target.crossing([(0, 4.0), (100, 2.0)], 1.5) == inf


def test_a_recorded_method() -> None:
    assert relative_steps(DENSE, "sgd") == relative_steps(DENSE, "adamw") == 1
    assert relative_steps(TOPK, "sgd") == recorded("sgd", method="topk", density=0.001) > 1
    assert relative_steps(POWERSGD, "adamw") == recorded("adamw", method="powersgd") > 1
    assert relative_steps(FP16, "adamw") == 1
    assert relative_steps(TOPK._replace(name="dgc"), "sgd") == 1  # its momentum is not counted for it
    four, default = (TOPK._replace(name=name) for name in ("regtopk:mu=4", "regtopk"))
    assert relative_steps(four, "sgd") == relative_steps(default, "sgd")


def test_a_method_that_sends_less_stands_in() -> None:
    fewer = relative_steps(TOPK, "sgd")
    denser = relative_steps(TOPK._replace(density=0.01), "sgd")
    assert denser is not None and fewer is not None and 1 <= denser < fewer
    every_2 = relative_steps(UPDATES, "adamw")
    assert relative_steps(UPDATES._replace(rounds=Rounds("updates", 1)), "adamw") == every_2
    assert relative_steps(UPDATES._replace(value_code="float32"), "adamw") == every_2


def test_without_a_record_nothing_is_claimed() -> None:
    fewer: list[dict[str, Any]] = [{"value_code": "4bit"}, {"density": 0.0005}]
    for change in (*fewer, {"name": "topk:impute=0.35"}, {"name": "strom"}):
        assert relative_steps(TOPK._replace(**change), "sgd") is None, change
    assert relative_steps(TOPK._replace(density=0.0009), "adamw") == inf  # it never reached the loss
    assert relative_steps(TOPK._replace(density=0.1), "adamw") is None


def test_rarer_or_later_rounds_are_no_stand_in() -> None:
    rounds = UPDATES.rounds
    assert relative_steps(UPDATES._replace(rounds=rounds._replace(every=16)), "adamw") is None
    later = relative_steps(UPDATES._replace(rounds=rounds._replace(delay=1)), "adamw")
    now = relative_steps(UPDATES, "adamw")
    assert later is not None and now is not None and later > now
    assert "AdamW" in about("adamw") and "SGD" in about("sgd")


def test_the_record_of_as_many_workers_or_more_counts() -> None:
    returned = PlannedMethod("topk:returned=0.03", 0.03, "2bit", Rounds("updates", 4, fragments=4))
    method = "topk:exchange=updates:every=4:fragments=4:returned=0.03"
    of_8, of_32 = (recorded("muon", method=method, workers=workers) for workers in (8, 32))
    assert of_8 < of_32
    denser = returned._replace(density=0.035)  # with 8 workers nothing as sparse has run
    found = [relative_steps(denser, "muon", n) for n in (2, 8, 9, 32, 100)]
    assert found == [of_8, of_8, of_32, of_32, of_32]
    assert relative_steps(returned, "muon", 2) == of_32


def test_a_record_of_alternatives_is_of_the_method_that_was_picked() -> None:
    label = "topk:density=0.01:exchange=updates:every=2|4:value_code=4bit:lr=0.1|0.2"
    record = {"method": label, "density": 0.01, "search": {"picked": {"lr": 0.2, "every": 4}}}
    key = steps_to_target.key_of(record, "float32", 8)
    assert key == steps_to_target.Key("topk:exchange=updates:every=4", 0.01, "4bit", 8)
