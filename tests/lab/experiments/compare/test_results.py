"""From records to final numbers, differences and the table, on numbers written by hand."""

import math
from typing import Any

import pytest

from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.compare.results import difference, student_t, summarise
from regtopk.lab.experiments.paper.fig3 import PRESETS
from regtopk.lab.runs import Record

BASE = "topk:density=0.01:index_code=raw32:value_code=float32"
OTHER_LR = f"{BASE}:lr=0.3"
SMOKE = {**PRESETS["smoke"], "algorithms": BASE, "num_steps": 70, "num_evaluations": 7}
EQUAL_BYTES = CompareConfig(**SMOKE, like="topk:0.01:raw32:float32", value_code="4bit")
SPENT: Record = {
    "density": 0.01,
    "lr": 0.1,
    "time_s": 60.0,
    "compress_s": 6.0,
    "hardware": "",
    "software": "",
}


def curve(method: str, seed: int, final: float, diverged: bool = False) -> list[Record]:
    """Two poor evaluations, then five around the final accuracy; 1000 bytes per step."""
    accuracies = [0.0, 5.0, final - 2, final + 2, final - 1, final + 1, final]
    own: Record = {"method": method, "seed": seed, "diverged": diverged, **SPENT}
    return [
        {**own, "step": 10 * n, "accuracy": accuracy, "payload_bytes": 10_000 * n}
        for n, accuracy in enumerate(accuracies, 1)
    ]


def summary_of(finals: dict[str, list[float]], diverged: str = "") -> dict[str, Any]:
    """Of methods with the final accuracies of seeds 0, 1, 2, ..."""
    curves = [
        curve(m, seed, final, m == diverged) for m, own in finals.items() for seed, final in enumerate(own)
    ]
    return summarise(EQUAL_BYTES, [record for own in curves for record in own])


def differences_of(summary: dict[str, Any]) -> dict[str, Any]:
    return {r["method"]: r["difference_from_topk"] for r in summary["results"]}


def test_a_deep_networks_accuracy_is_the_mean_of_the_last_five_evaluations() -> None:
    (result,) = summary_of({BASE: [40.0, 44.0]})["results"]
    assert result["final"] == [40.0, 44.0] and result["mean"] == 42.0
    assert result["std"] == pytest.approx(8**0.5)
    assert result["payload_bytes_per_step"] == 1000 and result["compress_share"] == pytest.approx(0.1)


def test_a_run_that_is_not_finished_has_no_result() -> None:
    records = curve(BASE, 0, 40.0) + curve("topk", 0, 90.0)[:-1]
    assert [r["method"] for r in summarise(EQUAL_BYTES, records)["results"]] == [BASE]


def test_two_seeds_have_no_interval_and_the_best_stands_first() -> None:
    tables = [summary_of({BASE: [40.0] * num, "topk": [50.0, 52.0, 51.0][:num]})["table"] for num in (2, 3)]
    assert [row["measure"] for row in tables[0]] == ["topk", BASE]
    assert [table[0]["95 % interval"] for table in tables] == [None, "+8.52 … +13.48"]


def test_differences_are_of_the_seeds_that_both_have() -> None:
    records = [r for seed in (0, 1, 2) for r in curve(BASE, seed, 40.0 + seed)]
    records += [r for seed in (1, 2, 5) for r in curve("topk", seed, 45.0 + seed)]
    found = differences_of(summarise(EQUAL_BYTES, records))
    assert found[BASE] is None
    assert found["topk"]["seeds"] == [1, 2] and found["topk"]["mean"] == pytest.approx(5)


def test_the_method_that_like_names_is_the_base_with_its_best_lr() -> None:
    found = differences_of(summary_of({BASE: [40.0] * 3, OTHER_LR: [45.0, 45.0, 46.0], "topk": [50.0] * 3}))
    assert found[OTHER_LR] is None and found[BASE]["mean"] == pytest.approx(-16 / 3)
    assert found["topk"]["mean"] == pytest.approx(14 / 3)


def test_what_diverged_is_no_base_and_stands_last() -> None:
    summary = summary_of({BASE: [40.0] * 2, OTHER_LR: [55.0] * 2, "topk": [50.0] * 2}, diverged=OTHER_LR)
    assert differences_of(summary)["topk"]["mean"] == pytest.approx(10)
    rows = [(row["measure"], row["diverged"]) for row in summary["table"]]
    assert rows == [("topk", None), (BASE, None), (OTHER_LR, "2 seeds")]
    assert summary["finding"].startswith("topk ends best of 3: accuracy 50 %, the mean of 2 seeds. ")


def test_without_it_the_plain_topk_is_the_base() -> None:
    finals = {"topk:value_code=2bit": 30.0, "topk": 50.0, "consensus": 51.0, "topk:exchange=updates": 60.0}
    found = differences_of(summary_of({method: [final] for method, final in finals.items()}))
    assert found["topk"] is None and found["consensus"]["mean"] == pytest.approx(1)


def test_paired_differences() -> None:
    # differences 1, 2, 3: mean 2, deviation 1; two degrees of freedom: t = sqrt(2) 0.95 / sqrt(1 - 0.95^2)
    margin = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)
    found = difference({0: 2.0, 1: 4.0, 2: 6.0, 3: 9.0}, {0: 1.0, 1: 2.0, 2: 3.0, 4: 9.0})
    assert found is not None and found["seeds"] == [0, 1, 2] and found["mean"] == 2.0
    assert (found["low"], found["high"]) == (pytest.approx(2 - margin), pytest.approx(2 + margin))
    assert difference({1: 1.0}, {1: 0.5}) == {"mean": 0.5, "low": None, "high": None, "seeds": [1]}
    assert difference({1: 1.0}, {2: 0.5}) is None


def test_students_t_is_that_of_printed_tables() -> None:
    printed = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 31: 2.040, 1000: 1.962}
    printed |= {9999: 1.960}
    assert {num_free: round(student_t(num_free), 3) for num_free in printed} == printed
