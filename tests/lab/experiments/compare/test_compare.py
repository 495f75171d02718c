"""Comparisons on small tasks: slices, equal bytes, what diverges, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk.algorithms import ALGORITHMS
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.budget import PayloadProbe
from regtopk.lab.experiments.compare.comparison import COMPARE
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.tasks import TASKS, Problem
from regtopk.lab.experiments.tasks.regression import LinearRegression
from regtopk.lab.experiments.training.trainer import Trainer
from regtopk.lab.method import Method
from regtopk.lab.report import write_report
from regtopk.lab.runs import read_records

SMALL: dict[str, Any] = {"num_steps": 12, "num_evaluations": 3, "num_workers": 4, "batch_size": 8}


def compare(folder: Path, *, resume: bool = False, **settings: Any) -> dict[str, Any]:
    config = CompareConfig(**{**SMALL, **settings})
    return COMPARE.record(config, folder, command="regtopk compare", resume=resume)


def test_every_algorithm_trains_on_digits(tmp_path: Path) -> None:
    summary = compare(tmp_path, densities=(0.05,))
    results = {result["method"]: result for result in summary["results"]}
    assert list(results) == list(ALGORITHMS)
    assert all(0 <= r["mean"] <= 100 and not r["diverged"] for r in results.values())
    assert {row["measure"] for row in summary["table"]} == set(ALGORITHMS)


def test_results_have_what_they_must_have(tmp_path: Path) -> None:
    summary = compare(tmp_path, algorithms="topk,regtopk:mu=1,dense", densities=(0.02, 0.1), seeds="2")
    results = summary["results"]
    assert [(r["method"], r["density"]) for r in results] == [
        ("topk", 0.02),
        ("topk", 0.1),
        ("regtopk:mu=1", 0.02),
        ("regtopk:mu=1", 0.1),
        ("dense", None),
    ]
    for result in results:
        assert len(result["final"]) == 2 and result["seeds"] == [0, 1]
    assert results[0]["difference_from_topk"] is None and results[1]["difference_from_topk"] is None
    assert set(results[4]["difference_from_topk"]) == {"mean", "low", "high", "seeds"}
    expected = results[3]["mean"] - results[1]["mean"]
    assert results[3]["difference_from_topk"]["mean"] == pytest.approx(expected)


def test_equal_bytes_are_equal(tmp_path: Path) -> None:
    summary = compare(
        tmp_path,
        algorithms="topk,consensus,randomk,topk:value_code=float32",
        like="topk:0.05:raw32:float32",
        value_code="4bit",
    )
    sent = {r["method"]: r["payload_bytes_per_step"] for r in summary["results"]}
    budget = 32 + 8 * round(0.05 * 4810)
    assert all(0.93 * budget <= size <= 1.001 * budget for size in sent.values()), sent
    density = {r["method"]: r["density"] for r in summary["results"]}
    assert density["randomk"] > density["consensus"] > density["topk"] > density["topk:value_code=float32"]


def test_a_budget_below_the_smallest_message_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="bytes per step must be at least the smallest message of topk"):
        compare(tmp_path / "out", algorithms="topk", bytes_per_step=20.0)
    assert not (tmp_path / "out").exists()


def test_slices_add_to_one_folder(tmp_path: Path) -> None:
    """Of each method, seed and density once, with the lr that an earlier slice has found."""
    settings: dict[str, Any] = {"densities": (0.02, 0.1), "lr": (1e-6, 0.2), "num_evaluations": 2}
    compare(tmp_path, algorithms="topk", seeds="2", **settings)
    first = read_records(tmp_path)
    summary = compare(tmp_path, algorithms="topk,dense", seeds="1,4", resume=True, **settings)
    records = read_records(tmp_path)
    assert records[: len(first)] == first
    ends = [(r["method"], r["density"], r["seed"]) for r in records if r["step"] == SMALL["num_steps"]]
    assert sorted(ends, key=str) == [("dense", None, 1), ("dense", None, 4)] + [
        ("topk", density, seed) for density in (0.02, 0.1) for seed in (0, 1, 4)
    ]
    assert [(r["method"], r["seeds"]) for r in summary["results"]] == [
        ("topk", [0, 1, 4]),
        ("topk", [0, 1, 4]),
        ("dense", [1, 4]),
    ]
    settings_now = json.loads((tmp_path / "config.json").read_text())["config"]
    assert (settings_now["algorithms"], settings_now["seeds"]) == ("topk,dense", "0,1,4,")
    record = records[0]
    assert (record["algorithm"], record["options"], record["index_code"]) == ("topk", {}, "elias-fano")
    assert write_report(tmp_path).exists()


def test_the_seed_that_learning_rates_are_picked_on_is_never_counted(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr": (1e-6, 0.2), "num_evaluations": 1}
    compare(tmp_path, algorithms="topk:lr=0.1", seeds="3", **settings)
    compare(tmp_path, algorithms="topk", seeds="1", resume=True, **settings)  # seed 1 is counted already
    compare(tmp_path, algorithms="dense", seeds="5,", resume=True, **settings)
    found = {(r["method"], r["lr"], r["tuning_seed"]) for r in read_records(tmp_path)}
    assert found == {("topk:lr=0.1", 0.1, None), ("topk", 0.2, 3), ("dense", 0.2, 3)}
    with pytest.raises(ArgumentError, match=r"seeds must not include the one on which .* picked, got 3"):
        compare(tmp_path, algorithms="topk", seeds="2-4", resume=True, **settings)


def test_data_for_a_task_that_reads_none_are_refused(tmp_path: Path) -> None:
    for task, message in {
        "digits": "digits come with scikit-learn and take no data, got '/nowhere'",
        "toy": "data must be empty for toy, which reads none, got '/nowhere'",
    }.items():
        config = CompareConfig(task=task, data="/nowhere")
        with pytest.raises(ArgumentError, match=message):
            COMPARE.record(config, tmp_path / "out", command="")
        assert not (tmp_path / "out").exists()


def test_all_methods_see_the_same_models_and_batches() -> None:
    task = Problem(CompareConfig(**SMALL)).task([0, 1])
    again = Problem(CompareConfig(**SMALL)).task([0, 1])
    assert torch.equal(task.start(), again.start()) and torch.equal(
        task.grads(task.start(), 3)[0], again.grads(task.start(), 3)[0]
    )
    assert not torch.equal(task.start()[0], task.start()[1])


def test_gradients_are_each_workers_own() -> None:
    task = Problem(CompareConfig(**SMALL)).task([0])
    model = task.start()
    grads, loss = task.grads(model, 0)
    network = task.network  # type: ignore[attr-defined]
    torch.nn.utils.vector_to_parameters(model[0], network.parameters())
    rows = task.order[0, 0, 2]  # type: ignore[attr-defined]
    x, y = task.examples.train[rows], task.examples.train_targets[rows]  # type: ignore[attr-defined]
    torch.nn.functional.cross_entropy(network(x), y).backward()
    expected = torch.cat([p.grad.flatten() for p in network.parameters()])
    torch.testing.assert_close(grads[0, 2], expected)
    assert float(loss) > 0


class Exploding(LinearRegression):
    """Seed 1's gradients become infinite at step 5."""

    def grads(self, models: Tensor, step: int) -> tuple[Tensor, Tensor]:
        grads, loss = super().grads(models, step)
        if step >= 5:
            grads[self.seeds.index(1)] = math.inf
        return grads, loss


@pytest.mark.parametrize("method", ["topk", "consensus"])  # side by side, and one after another
def test_a_seed_that_diverges_stops_alone(method: str) -> None:
    config = CompareConfig(task="linreg", num_steps=20, num_workers=4, batch_size=120)
    task = Exploding(config, [0, 1, 2])
    algorithm = Method.parse(method).build(density=0.5, value_code=None)
    trainer = Trainer(task, algorithm, optimizer="sgd", lr=0.01, index_code="raw32")
    trainer.run_until(5)
    at_five = [quality["distance"] for quality in task.evaluate(trainer.models)]
    trainer.run_until(20)
    final = [quality["distance"] for quality in task.evaluate(trainer.models)]
    assert trainer.is_diverged == [False, True, False]
    assert final[1] == at_five[1] and final[0] < at_five[0] and final[2] < at_five[2]
    assert None not in trainer.take_losses()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "digit"}, "task must be one of .*did you mean 'digits'"),
        ({"algorithms": "topk,regtopp"}, "algorithm .*'regtopp'"),
        ({"algorithms": ","}, "methods must be different and at least one, got ''"),
        ({"algorithms": "topk,topk"}, "methods must be different and at least one, got 'topk,topk'"),
        ({"algorithms": "topk,topk:lr=0.2"}, "methods must be different"),
        ({"algorithms": "topk,topk:density=0.01"}, "methods must be different"),
        ({"algorithms": "regtopk:mu=1,regtopk:mu=1.0"}, "methods must be different"),
        ({"algorithms": "topk,topk:value_code=4bit", "value_code": "4bit"}, "methods must be different"),
        ({"algorithms": "dense:optimizer=sgdx"}, "optimizer .*'sgdx'"),
        ({"optimizer": "adamax"}, "optimizer must be one of .*did you mean 'adam'"),
        ({"split": "sort"}, "split .*'sort'"),
        ({"seeds": "two"}, "seeds .*'two'"),
        ({"densities": (0.0,)}, "density"),
        ({"densities": (0.1, 0.1)}, "densities must be different and at least one"),
        ({"bytes_per_step": -1.0}, "bytes_per_step must be in"),
        ({"bytes_per_step": 99.0, "like": "topk:0.1:raw32:float32"}, "give one of bytes_per_step and like"),
        ({"like": "topk:0.1"}, "like .*'topk:0.1'"),
        ({"width": 64}, "width must not be given for digits, whose network is fixed, got 64"),
        ({"task": "small-cnn", "context": 8}, "context must not be given for small-cnn"),
        ({"task": "small-cnn", "precision": "float16"}, "precision must be one of float32, bfloat16"),
        (
            {"task": "linreg", "algorithms": "topk:exchange=updates"},
            r"exchange=updates needs one of the tasks .*gpt, .*, got 'linreg'",
        ),
        (
            {"algorithms": "topk:exchange=updates:every=7"},
            "every must divide the number of steps, 300, got 'topk:exchange=updates:every=7'",
        ),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        CompareConfig(**settings)


def test_at_equal_bytes_an_open_density_is_another_method() -> None:
    CompareConfig(algorithms="topk,topk:density=0.01", like="topk:0.01:raw32:float32")


def test_a_probe_measures_what_is_sent() -> None:
    config = CompareConfig(**SMALL)
    task = Problem(config).task([0])
    payload = PayloadProbe(config, task).payload(Method.parse("topk:index_code=raw32"), 0.01)
    assert payload == 32 + 8 * 48


def test_what_is_recorded_is_what_is_used(tmp_path: Path) -> None:
    config = CompareConfig(task="toy", num_steps=4)
    defaults = TASKS["toy"].defaults
    assert (config.num_workers, config.num_steps) == (defaults["num_workers"], 4)
    assert config.batch_size == defaults["batch_size"] and config.lr == defaults["lr"]
    assert config.algorithms.split(",") == list(ALGORITHMS)
    small = CompareConfig(task="toy", algorithms="dense, topk", num_steps=4, num_evaluations=2)
    COMPARE.record(small, tmp_path, command="regtopk compare")
    recorded = json.loads((tmp_path / "config.json").read_text())["config"]
    assert recorded["algorithms"] == "dense,topk" and recorded["lr"] == list(defaults["lr"])
    assert recorded["num_workers"] == defaults["num_workers"]
