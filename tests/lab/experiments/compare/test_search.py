"""The search of hyperparameters: which points are tried, what is kept of it, and how it goes on."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from regtopk.lab.experiments.compare import comparison
from regtopk.lab.experiments.compare.search import find_best
from regtopk.lab.method import Grid, GridPoint
from regtopk.lab.report import write_report
from regtopk.lab.runs import read_records
from tests.lab.experiments.compare import test_compare

UPDATES = "topk:exchange=updates:every=1|2|4:value_code=float32|4bit"
compare = partial(test_compare.compare, num_steps=8, num_evaluations=1)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was trained so far: words, lr and seeds."""
    runs: list[tuple[Any, ...]] = []
    original = comparison._train

    def noted(config: Any, task: Any, run: Any, *given: Any) -> Any:
        runs.append((run.method.label, run.method.lr, list(task.seeds)))
        return original(config, task, run, *given)

    monkeypatch.setattr(comparison, "_train", noted)
    return runs


def test_one_option_after_another_is_searched_from_the_middle_and_no_point_twice() -> None:
    grid = Grid.parse("topk:density=0.1|0.2|0.3|0.4", (1.0, 2.0, 3.0))

    def tried(num_runs: int) -> tuple[GridPoint, list[str]]:
        points: list[GridPoint] = []

        def cost_of(point: GridPoint) -> float:
            points.append(point)
            return float(point[1]) - float(point[0])  # best with the largest lr and the smallest density

        return find_best(grid, num_runs, cost_of), [" ".join(point) for point in points]

    first = ["2.0 0.2", "3.0 0.2", "3.0 0.3", "3.0 0.1"]  # 3.0 is better than 2.0: 1.0 is not tried
    assert tried(2) == (("3.0", "0.2"), first[:2])
    assert tried(4) == (("3.0", "0.1"), first)
    rest = ["2.0 0.1", "1.0 0.1", "3.0 0.4"]  # beside the best, then what differs from it in one option
    assert tried(7) == (("3.0", "0.1"), first + rest)
    assert tried(12)[0] == ("3.0", "0.1") and len(set(tried(12)[1])) == 12
    assert find_best(grid, 12, lambda point: 0.0) == ("1.0", "0.1")


@pytest.mark.usefixtures("undrawn")
def test_a_row_says_what_was_picked_among_what(tmp_path: Path, trained: list[tuple[Any, ...]]) -> None:
    """All rows have five runs, and the one with fewer points has those; the label is that of the words."""
    lists = f"dense,topk:lr=0.2|0.1:density=0.02|0.1,{UPDATES}"
    summary = compare(tmp_path, algorithms=lists, lr=(1e-6, 0.2, 1e-5), num_search_runs=5, seeds="2")
    assert summary["notes"] == ["Searches are judged by the test examples, on a seed that does not count."]
    dense, topk, updates = summary["results"]
    assert [r["method"] for r in summary["results"]] == lists.split(",")
    assert [len(r["search"]["runs"]) for r in summary["results"]] == [3, 4, 5]
    assert [r["search"]["num_points"] for r in summary["results"]] == [3, 4, 18]
    assert [seeds for *_, seeds in trained] == [*[[2]] * 3, [0, 1], *[[2]] * 4, [0, 1], *[[2]] * 5, [0, 1]]
    for result in summary["results"]:
        search = result["search"]
        finals = [run["final"] for run in search["runs"]]
        picked = next(run for run in search["runs"] if run["settings"] == search["picked"])
        assert picked["final"] == max(finals) and not picked["diverged"]
        assert result["lr"] == search["picked"]["lr"]
    assert dense["search"]["picked"] == {"lr": 0.2} and dense["search"]["at_edge"] == ["lr"]
    assert topk["search"]["at_edge"] == ["lr", "density"]
    assert "value_code" not in updates["search"]["at_edge"]
    records = {r["method"]: r for r in read_records(tmp_path)}
    assert records["dense"]["tuning"].keys() == {"1e-06", "0.2", "1e-05"}
    own = records[UPDATES]
    assert (own["tuning"], own["tuning_seed"], own["search"]) == (None, 2, updates["search"])
    assert (own["every"], own["lr"]) == tuple(updates["search"]["picked"][name] for name in ("every", "lr"))
    row = next(row for row in summary["table"] if row["measure"] == "dense")
    assert (row["picked"], row["search runs"], row["at the grid's edge"]) == ("lr=0.2", "3 of 3", "lr")
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "3 of 3" in page and "2 %|10 %" in page


def test_at_equal_bytes_each_point_has_its_own_density(tmp_path: Path) -> None:
    method = "topk:exchange=updates:every=1|4"
    summary = compare(tmp_path, algorithms=method, like="topk:0.02:raw32:float32", lr=(0.1, 0.2))
    (result,) = summary["results"]
    densities: dict[int, set[float]] = {}
    for run in result["search"]["runs"]:
        densities.setdefault(run["settings"]["every"], set()).add(run["density"])
    (rarely,), (always,) = densities[4], densities[1]
    assert 3.5 * always < rarely < 6 * always
    assert result["density"] == (rarely if result["search"]["picked"]["every"] == 4 else always)


def test_a_search_that_was_interrupted_goes_on(tmp_path: Path, trained: list[tuple[Any, ...]]) -> None:
    settings: dict[str, Any] = {"algorithms": UPDATES, "lr": (0.1, 0.2), "num_search_runs": 4}
    whole = compare(tmp_path / "whole", **settings)
    all_runs = list(trained)
    trained.clear()

    def progress(fraction: float, words: str = "") -> None:
        if "search run 4 of 4" in words:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "parts", progress=progress, **settings)
    assert trained == all_runs[:3]
    trained.clear()
    parts = compare(tmp_path / "parts", resume=True, **settings)
    assert trained == all_runs[3:]
    assert parts["results"][0]["search"] == whole["results"][0]["search"]
    assert parts["results"][0]["final"] == whole["results"][0]["final"]
    compare(tmp_path / "parts", resume=True, **settings | {"seeds": "2-3"})
    assert trained[len(all_runs) - 3 :] == [(all_runs[-1][0], all_runs[-1][1], [2, 3])]
    assert not list((tmp_path / "parts").glob("checkpoint-*"))


def test_a_choice_from_before_searches_were_recorded_is_kept(
    tmp_path: Path, trained: list[tuple[Any, ...]]
) -> None:
    compare(tmp_path, algorithms="topk", lr=(1e-6, 0.2))
    (tmp_path / "search.json").unlink()
    records = read_records(tmp_path)
    lines = (json.dumps({k: v for k, v in r.items() if k != "search"}) + "\n" for r in records)
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    trained.clear()
    compare(tmp_path, algorithms="topk", lr=(1e-6, 0.2), seeds="2,", resume=True)
    assert trained == [("topk", 0.2, [2])]
    assert read_records(tmp_path)[-1]["tuning"] == records[0]["tuning"]
