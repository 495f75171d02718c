"""Figure 1 and the second toy example, and the paper's small problems as tasks of `compare`."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from regtopk.lab.experiments.compare.comparison import COMPARE
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.experiment import silent
from regtopk.lab.experiments.paper.toy import FIG1, SCALING, ScalingConfig, ToyConfig, grads, risk
from regtopk.lab.experiments.tasks import convex


@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
def test_figure_1_is_the_published_one_for_every_mu(mu: float) -> None:
    config = ToyConfig(mu=mu, num_iterations=102)
    records = list(FIG1.run(config, silent))
    assert [r["iteration"] for r in records if "published" not in r] == [101, 102] * 5
    summary = FIG1.summarise(config, records)
    assert set(summary["max_abs_difference"]) == {"dense", "topk", "regtopk", "regtopk-cap"}
    assert max(summary["max_abs_difference"].values()) <= 1e-12
    assert mu != 1.0 or summary["difference_as_printed"] > 1e-2  # Algorithm 1 as printed


def test_gradients_are_those_of_the_risks() -> None:
    config = ScalingConfig(curvature=0.3)
    w = torch.tensor([0.01, -0.4], dtype=torch.float64, requires_grad=True)
    (toy_grad,) = torch.autograd.grad(convex.risk(w), w)
    torch.testing.assert_close(convex.grads(w.detach()).mean(0), toy_grad)
    (grad,) = torch.autograd.grad(risk(config, w), w)
    torch.testing.assert_close(grads(config, w.detach()).mean(0), grad)


def test_a_large_risk_does_not_overflow() -> None:
    w = torch.tensor([20.0, 1.0], dtype=torch.float64, requires_grad=True)  # <w, x_n> = 2001 and -1999
    found = convex.risk(w)
    assert float(found.detach()) == 1999 / 2
    (grad,) = torch.autograd.grad(found, w)
    assert grad.tolist() == [50.0, -0.5]


def scaling_summary(**settings: Any) -> dict[str, Any]:
    config = ScalingConfig(**settings)
    return SCALING.summarise(config, list(SCALING.run(config, silent)))


def test_top1_waits_and_then_takes_one_long_step() -> None:
    summary = scaling_summary()
    # 100 s / (1 - s) = 36.8 iterations of the second entry outgrow the first, s = 1 / (1 + e)
    s = 1 / (1 + math.e)
    assert summary["num_iterations_waited"]["topk"] == math.floor(100 * s / (1 - s)) == 36
    assert summary["first_step_scale"]["topk"] == pytest.approx(37, rel=1e-12)
    assert summary["num_iterations_waited"]["regtopk"] == 1
    assert summary["longest_step_scale"]["regtopk"] == pytest.approx(2, rel=1e-12)
    assert summary["final_risk"]["regtopk"] == pytest.approx(summary["final_risk"]["dense"], abs=1e-8)
    assert summary["final_risk"]["topk"] > 100


def test_the_papers_50_iterations_need_another_slope() -> None:
    # G' = F_n' at the start, so that the gradients are s (-+100, -2)
    summary = scaling_summary(slope=-1 / (1 + math.e))
    assert summary["num_iterations_waited"]["topk"] == summary["paper_topk"]["num_iterations_waited"] == 50
    assert summary["first_step_scale"]["topk"] == pytest.approx(51, rel=1e-12)


def test_a_method_that_never_moves() -> None:
    summary = scaling_summary(num_iterations=10)
    assert summary["num_iterations_waited"]["topk"] is None and "topk" not in summary["first_step_scale"]
    assert summary["longest_step_scale"]["topk"] == 0


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
