"""The paper's small problems as tasks of `compare`."""

from pathlib import Path
from typing import Any

import pytest

from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.comparison import COMPARE
from regtopk.lab.experiments.compare.config import CompareConfig


def finals(folder: Path, **settings: Any) -> dict[str, float]:
    config = CompareConfig(algorithms="dense,topk,regtopk:mu=1", **settings)
    summary = COMPARE.record(config, folder, command="regtopk compare")
    return {result["method"]: result["mean"] for result in summary["results"]}


def test_on_the_toy_topk_stands_still_and_regtopk_follows_dense(tmp_path: Path) -> None:
    risks = finals(tmp_path, task="toy", densities=(0.5,))
    assert risks["regtopk:mu=1"] < 1.01 * risks["dense"] < 0.1 * risks["topk"]


def test_all_approach_the_optimum_of_the_regression(tmp_path: Path) -> None:
    distances = finals(tmp_path, task="linreg", densities=(0.5,), num_steps=200, num_workers=4, seeds="2")
    assert all(0 < distance < 2 for distance in distances.values())


@pytest.mark.parametrize("wrong", [{"num_workers": 3}, {"split": "sorted"}, {"width": 8}])
def test_settings_that_the_toy_does_not_have(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        CompareConfig(task="toy", algorithms="topk", **wrong)
