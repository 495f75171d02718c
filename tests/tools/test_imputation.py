"""What docs/imputation.md draws."""

from pathlib import Path

import pytest

from regtopk.lab.runs import read_run
from tools.imputation import RUNS, TITLES, by_rho, draw


@pytest.mark.parametrize("name", TITLES)
def test_the_recorded_runs_have_every_rho(name: str) -> None:
    rows = read_run(RUNS / name).summary["table"]
    assert list(by_rho(rows)) == [0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0]
    assert {"dense", "topk:impute=learned"} <= {row["measure"] for row in rows}


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    draw(RUNS, tmp_path / "imputation.png")
    assert (tmp_path / "imputation.png").stat().st_size > 10_000
