"""How the learning rates are chosen, how the recorded file grows, and what counts as a peak."""

import json
from pathlib import Path
from typing import Any

from benchmarks.slow_network.rank import busiest
from benchmarks.slow_network.results import Results
from benchmarks.slow_network.search import best_lr, reached_accuracy, steps_to, target_of


def run_of(lr: float, accuracies: list[float]) -> dict[str, Any]:
    curve = [[float(second), accuracy] for second, accuracy in enumerate(accuracies)]
    kind = {"method": "dense", "density": None, "value_code": None, "collective": "all_reduce"}
    link = {"workers": 2, "bandwidth_bits_per_s": None, "latency_s": 0.0, "params": 10}
    return {**link, **kind, "lr": lr, "target": None, "steps": 10 * len(curve), "curve": curve}


def test_the_target_is_a_point_below_the_best_mean_of_the_last_evaluations() -> None:
    assert reached_accuracy([[0.0, 99.0], [1.0, 99.0]]) == 0
    assert reached_accuracy([[0.0, 1.0], [1.0, 80.0], [2.0, 81.0], [3.0, 85.0]]) == 82
    rows = [run_of(0.1, [70, 70, 70]), run_of(0.2, [80, 80, 80]), run_of(0.4, [99, 10, 10])]
    assert target_of(rows) == 79


def test_the_soonest_learning_rate_wins() -> None:
    late, soon = run_of(0.1, [0, 0, 0, 90, 90, 90]), run_of(0.2, [0, 90, 90, 90, 0, 0])
    never = run_of(0.4, [80, 80, 80, 80])
    assert [steps_to(row, 85) for row in (late, soon, never)] == [60, 40, None]
    assert best_lr([late, soon, never], 85) == 0.2
    assert best_lr([never], 85) is None


def test_a_newer_row_replaces_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "results" / "slow.json"
    Results(path, "first").add("time_to_accuracy", run_of(0.1, [1, 2, 3]))
    Results(path, "second").add("time_to_accuracy", run_of(0.2, [4, 5, 6]))
    Results(path, "first").add("time_to_accuracy", run_of(0.1, [7, 8, 9]))
    content = json.loads(path.read_text())
    assert content["command"] == "first && second"
    assert {row["lr"]: row["curve"][0][1] for row in content["time_to_accuracy"]} == {0.1: 7, 0.2: 4}
    assert content["steps"] == [] and content["torch"] and content["hardware"]
    assert [path.name for path in path.parent.iterdir()] == ["slow.json"]


def test_the_busiest_window() -> None:
    assert busiest([]) == 0
    counts = [(0.0, 0), (0.05, 10), (0.1, 20), (0.15, 120), (0.3, 130), (0.35, 130)]
    assert busiest(counts) == 110  # from 0.05 to 0.15
    assert busiest(counts, window_s=1.0) == 130
