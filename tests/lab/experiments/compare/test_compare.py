"""Comparisons on small tasks: slices, equal bytes, what diverges, and what is refused."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from regtopk.algorithms import ALGORITHMS
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.comparison import COMPARE
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.experiment import ShowProgress, silent
from regtopk.lab.experiments.tasks import Problem
from regtopk.lab.report import write_report
from regtopk.lab.runs import read_records

pytestmark = pytest.mark.usefixtures("small_products")
SMALL: dict[str, Any] = {"num_steps": 12, "num_evaluations": 3, "num_workers": 4, "batch_size": 8}


def compare(
    folder: Path, *, resume: bool = False, progress: ShowProgress = silent, **settings: Any
) -> dict[str, Any]:
    config = CompareConfig(**{**SMALL, **settings})
    return COMPARE.record(config, folder, command="regtopk compare", resume=resume, progress=progress)


def test_every_algorithm_trains_on_digits(tmp_path: Path) -> None:
    summary = compare(tmp_path, densities=(0.05,), num_steps=4, num_evaluations=1)
    results = {result["method"]: result for result in summary["results"]}
    assert list(results) == list(ALGORITHMS)
    assert all(0 <= r["mean"] <= 100 and not r["diverged"] for r in results.values())
    assert {row["measure"] for row in summary["table"]} == set(ALGORITHMS)


def test_each_density_is_compared_with_topk_at_that_density(tmp_path: Path) -> None:
    summary = compare(tmp_path, algorithms="topk,regtopk:mu=1,dense", densities=(0.02, 0.1), seeds="2")
    results = {(r["method"], r["density"]): r for r in summary["results"]}
    assert list(results) == [*itertools.product(("topk", "regtopk:mu=1"), (0.02, 0.1)), ("dense", None)]
    assert all(len(r["final"]) == 2 and r["seeds"] == [0, 1] for r in results.values())
    assert results["topk", 0.02]["difference_from_topk"] is None
    expected = results["regtopk:mu=1", 0.1]["mean"] - results["topk", 0.1]["mean"]
    assert results["regtopk:mu=1", 0.1]["difference_from_topk"]["mean"] == pytest.approx(expected)


def test_workers_that_are_slow_or_bad(tmp_path: Path) -> None:
    updates = "topk:exchange=updates:density=0.5"
    labels = [f"{updates}:every={every}" for every in ("4", "4/4/4/4", "4/4/4/1", "4:clip_norm=3")]
    losses = {}
    for bad_worker in (1.0, 1000.0):
        folder = tmp_path / f"{bad_worker}"
        compare(folder, algorithms=",".join(labels), bad_worker=bad_worker, num_steps=24, lr=(0.2,))
        losses[bad_worker] = [r["loss"] for r in read_records(folder) if r["step"] == 24]
    (alike, each_alone, one_slow, _), (spoilt, _, _, clipped) = losses.values()
    assert alike == each_alone != one_slow < 1.1 * alike
    assert clipped < 1.1 * alike and spoilt > 2 * alike


def test_equal_bytes_are_equal(tmp_path: Path) -> None:
    summary = compare(
        tmp_path,
        algorithms="topk,consensus,randomk,topk:value_code=float32",
        like="topk:0.05:raw32:float32",
        value_code="4bit",
        num_steps=3,
    )
    sent = {r["method"]: r["payload_bytes_per_step"] for r in summary["results"]}
    budget = 32 + 8 * round(0.05 * 4810)
    assert all(0.93 * budget <= size <= 1.001 * budget for size in sent.values()), sent
    density = {r["method"]: r["density"] for r in summary["results"]}
    assert density["randomk"] > density["consensus"] > density["topk"] > density["topk:value_code=float32"]
    parts = [2**11 * math.log(found) / math.log(1 / 4810) for found in density.values()]
    assert parts == pytest.approx([round(part) for part in parts], abs=1e-6), "recorded runs have others"


def test_a_budget_that_is_not_used_up_or_exceeded_is_told(tmp_path: Path) -> None:
    words = "topk,topk:value_code=4bit,dense:value_code=float32"
    summary = compare(tmp_path, algorithms=words, received_bytes_per_step=30_000.0, num_steps=3)
    some, full, dense = summary["results"]
    assert some["density"] < full["density"] == 1
    assert summary["notes"] == [
        "topk:value_code=4bit leaves a part of the byte budget unused: density 1 moves "
        f"{full['received_bytes_per_step']:,.0f} of 30,000 bytes per step."
    ]
    assert dense["received_bytes_per_step"] < 30_000
    less = compare(tmp_path / "less", algorithms=words, received_bytes_per_step=20_000.0, num_steps=3)
    assert less["notes"][1:] == [
        "These move more than the budget of 20,000, for they have no density: dense:value_code=float32."
    ]


@pytest.mark.parametrize("budget", [{"like_received": "topk:0.02:raw32:float32"}, {}])
def test_equal_bytes_received_are_equal(tmp_path: Path, budget: dict[str, Any]) -> None:
    """Of four workers each receives three messages of Top-k, but what comes back only once."""
    most = 3 * (32 + 8 * round(0.02 * 4810))
    budget = budget or {"received_bytes_per_step": float(most)}
    parts = "topk:returned=0.1:value_code=float32:exchange=updates:every=2:fragments=2"
    methods = ["topk", "consensus", "topk:returned=0.1", parts, "topk:exchange=updates:every=2"]
    summary = compare(tmp_path, algorithms=",".join(methods), value_code="4bit", num_steps=6, **budget)
    results = {r["method"]: r for r in summary["results"]}
    for r in results.values():
        assert 0.93 * most <= r["received_bytes_per_step"] <= 1.001 * most, r
        assert r["sent_bytes_per_step"] == pytest.approx(r["received_bytes_per_step"])
        assert r["dense_bytes_per_step"] == 1.5 * 4 * 4810
        times = 1.5 * 4 * 4810 / r["received_bytes_per_step"]
        assert r["float32_ring_over_received"] == pytest.approx(times)
        assert r["bfloat16_ring_over_received"] == pytest.approx(times / 2)
    assert results["topk"]["payload_bytes_per_step"] == pytest.approx(most / 3, rel=0.07)
    density = {method: r["density"] for method, r in results.items()}
    assert density["topk"] < density[methods[-1]] < density["topk:returned=0.1"]
    assert all(row["received per step"] and row["bfloat16 ring / received"] for row in summary["table"])
    if "like_received" in budget:  # one page is enough: it takes seconds to draw
        assert "bytes a worker has received" in write_report(tmp_path).read_text(encoding="utf-8")


@pytest.mark.usefixtures("undrawn")
def test_slices_add_to_one_folder(tmp_path: Path) -> None:
    """Of each method, seed and density once, with the lr that an earlier slice has found."""
    settings: dict[str, Any] = {"densities": (0.02, 0.1), "lr": (1e-6, 0.2), "num_evaluations": 2}
    compare(tmp_path, algorithms="topk", seeds="2", **settings)
    first = read_records(tmp_path)
    summary = compare(tmp_path, algorithms="topk,dense", seeds="1,4", resume=True, **settings)
    records = read_records(tmp_path)
    assert records[: len(first)] == first
    ends = [(r["method"], r["density"], r["seed"]) for r in records if r["step"] == SMALL["num_steps"]]
    of_topk = [("topk", density, seed) for density in (0.02, 0.1) for seed in (0, 1, 4)]
    assert sorted(ends, key=str) == [("dense", None, 1), ("dense", None, 4), *of_topk]
    assert [(r["method"], len(r["seeds"])) for r in summary["results"]] == [
        ("topk", 3),
        ("topk", 3),
        ("dense", 2),
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
    with pytest.raises(ArgumentError, match=r"seeds must not include .* of the search, got 3"):
        compare(tmp_path, algorithms="topk", seeds="2-4", resume=True, **settings)


def test_gradients_are_each_workers_own() -> None:
    task = Problem(CompareConfig(**SMALL)).task([0])
    model = task.start()
    grads, loss = task.grads(model, 0)
    network = task.network  # type: ignore[attr-defined]
    torch.nn.utils.vector_to_parameters(model[0], network.parameters())
    rows = task.order[0, 0, 2]  # type: ignore[attr-defined]
    x, y = task.examples.train[rows], task.examples.train_targets[rows]
    torch.nn.functional.cross_entropy(network(x), y).backward()
    expected = torch.cat([p.grad.flatten() for p in network.parameters()])
    torch.testing.assert_close(grads[0, 2], expected)
    assert float(loss) > 0


NOT_OF_THE_TOY: list[dict[str, Any]] = [{"num_workers": 3}, {"split": "sorted"}, {"width": 8}]


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
        ({"densities": (0.1, 0.1)}, "densities must be different and at least one"),
        ({"bytes_per_step": -1.0}, "bytes_per_step must be in"),
        (
            {"bytes_per_step": 99.0, "like_received": "topk:0.1:raw32:float32", "densities": (0.1, 0.2)},
            "give one of bytes_per_step, like, received_bytes_per_step, like_received and several densities, "
            r"got bytes_per_step=99.0, like_received=topk:0.1:raw32:float32, densities=\(0.1, 0.2\)",
        ),
        (
            {"received_bytes_per_step": 99.0, "densities": (0.1, 0.2)},
            "several densities, got received_bytes",
        ),
        ({"like_received": "topk:0.1"}, "like must be NAME:DENSITY:INDEX_CODE:VALUE_CODE, got 'topk:0.1'"),
        ({"width": 64}, "width is fixed for digits: do not give it, got 64"),
        ({"task": "small-cnn", "precision": "float16"}, "precision must be one of float32, bfloat16"),
        ({"algorithms": "topk:exchange=updates:every=0"}, "every must be an integer of at least 1, got 0"),
        ({"algorithms": "topk:exchange=update"}, "exchange must be one of .*did you mean 'updates'"),
        ({"algorithms": "topk:every=2"}, "every must stand with exchange=updates, got 'topk:every=2'"),
        ({"algorithms": "topk:exchange=gradients:every=2:outer=sgd"}, "every and outer must stand with"),
        ({"algorithms": "topk:exchange=updates:outer=nester"}, "outer must be one of .*'nesterov'"),
        ({"algorithms": "topk:exchange=updates:outer_lr=0.5"}, "outer_lr and outer_momentum need an outer"),
        ({"algorithms": "topk:exchange=updates:outer=sgd:outer_lr=x"}, "outer_lr .*'x'"),
        ({"algorithms": "topk:exchange=updates:outer=nesterov:outer_momentum=1"}, "outer_momentum .* got 1"),
        ({"algorithms": "topk:weight_decay=-1"}, r"^weight_decay must be in \[0, inf\), got -1$"),
        ({"algorithms": "topk:beta2=1:optimizer=adam"}, r"^beta2 must be in \[0, 1\), got 1$"),
        ({"algorithms": "topk:beta2=0.9"}, "beta2 must stand with optimizer=adam or adamw or muon, got"),
        ({"task": "gpt", "width": 100}, "width must be a multiple of 64, or smaller, got 100"),
        ({"task": "gpt", "num_layers": -1}, "num_layers .* got -1"),
        ({"task": "gpt", "split": "dirichlet"}, "split must be iid or sorted for gpt, .* got 'dirichlet'"),
        (
            {"algorithms": "topk:exchange=updates:every=7"},
            "every must divide num_steps = 300, got 'topk:exch",
        ),
        (
            {"algorithms": "topk:exchange=updates:every=4/2", "num_workers": 3},
            "^every must have a number for each of 3 workers, got 'topk:exchange=updates:every=4/2'$",
        ),
        ({"bad_worker": 0.0}, r"bad_worker must be in \(0, inf\), got 0.0"),
        *(({"task": "toy", "algorithms": "topk", **wrong}, next(iter(wrong))) for wrong in NOT_OF_THE_TOY),
        (
            {"algorithms": "dense,topk:optimizer=muon"},
            "^optimizer must not be muon for digits, whose model has no blocks of matrices, got "
            "'topk:optimizer=muon'$",
        ),
        ({"task": "gpt", "tokens": "words"}, "tokens must be one of characters, bytes, gpt2, got 'words'"),
        ({"task": "digits", "tokens": "bytes"}, "tokens is fixed for digits: do not give it, got 'bytes'"),
        # alternatives that are searched
        ({"algorithms": "topk:lr=0.1|fast"}, "lr must be positive and finite, got 'fast'"),
        ({"algorithms": "topk:lr=0.1|"}, "lr must be positive and finite, got ''"),
        ({"algorithms": "topk:value_code=4bit|5bit"}, "value_code .*'5bit'"),
        ({"algorithms": "topk:exchange=updates:every=2|7"}, "every must divide num_steps = 300, .*every=7'"),
        ({"algorithms": "topk:exchange=updates:outer=none|sgd:outer_lr=1"}, "outer_lr .* need an outer"),
        (
            {"algorithms": "topk:density=0.1|0.10"},
            r"^density must have different values, got 0.1, 0.10 in 'topk:density=0.1\|0.10'$",
        ),
        ({"algorithms": "topk,topk:lr=0.2|0.1", "lr": (0.1, 0.2)}, "methods must be different"),
        ({"num_search_runs": -1}, "num_search_runs must be an integer of at least 0, got -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        CompareConfig(**settings)


def test_what_is_recorded_is_what_is_used(tmp_path: Path) -> None:
    assert CompareConfig().algorithms.split(",") == list(ALGORITHMS)
    COMPARE.record(CompareConfig(algorithms="dense, topk", num_steps=4), tmp_path, command="regtopk compare")
    recorded = json.loads((tmp_path / "config.json").read_text())["config"]
    assert (recorded["algorithms"], recorded["num_steps"], recorded["optimizer"]) == ("dense,topk", 4, "sgd")
    assert (recorded["num_workers"], recorded["lr"]) == (8, [0.2])
