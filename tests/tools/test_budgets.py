"""Several budgets in one figure."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from regtopk.errors import ArgumentError
from regtopk.lab.runs import Run
from tools.budgets import curves_of, draw_budgets

TOOLS = Path(__file__).parents[2] / "tools"


def run_of(num_bytes: float, finals: dict[str, list[float]]) -> Run:
    results: list[dict[str, Any]] = [
        {
            "method": method,
            "payload_bytes_per_step": num_bytes,
            "mean": sum(final) / len(final),
            "final": final,
        }
        for method, final in finals.items()
    ]
    summary = {"metric": "accuracy", "base": next(iter(finals)), "results": results}
    return Run(
        Path("here"), {"config": {"like": "topk:0.01:raw32:float32", "value_code": "4bit"}}, [], summary
    )


RUNS = [
    run_of(400.0, {"topk:density=0.04:lr=1": [60.0, 62.0], "consensus": [70.0], "dgc": [10.0]}),
    run_of(100.0, {"topk:density=0.01:lr=1": [50.0, 54.0], "consensus": [60.0]}),
]


def test_methods_that_all_runs_have_rise_with_the_bytes() -> None:
    curves = curves_of(RUNS)
    assert list(curves) == ["topk:lr=1", "consensus"]
    points = [(point.num_bytes, point.low, point.mean, point.high) for point in curves["topk:lr=1"]]
    assert points == [(100.0, 50.0, 52.0, 54.0), (400.0, 60.0, 61.0, 62.0)]


def test_what_tells_nothing_of_budgets_is_refused() -> None:
    with pytest.raises(ArgumentError, match="at least two"):
        curves_of(RUNS[:1])
    with pytest.raises(ArgumentError, match="in common"):
        curves_of([RUNS[0], run_of(100.0, {"randomk": [1.0]})])
    coded = run_of(100.0, {"consensus": [60.0]})
    coded.header["config"]["value_code"] = "2bit"
    with pytest.raises(ArgumentError, match="budget alone, got value_code '4bit' in here and '2bit' in here"):
        curves_of([RUNS[0], coded])
    other = Run(Path("there"), RUNS[0].header, [], {"metric": "gap", "results": []})
    with pytest.raises(ArgumentError, match="there"):
        curves_of([RUNS[0], other])


@pytest.mark.parametrize("module", ["budgets", "tables"])
def test_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str
) -> None:
    script = str(TOOLS / f"{module}.py")
    words = [str(tmp_path / "none"), *(["picture.png"] if module == "budgets" else [])]
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(script, run_name="__main__")
    assert done.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{module}.py: error: folder must hold a finished run")


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "budgets.png"
    draw_budgets(RUNS, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
