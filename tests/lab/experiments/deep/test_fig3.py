"""Slices of deep trainings: what runs, what is kept, and that resuming changes no bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk.errors import ArgumentError, OutputError
from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.paper.fig3 import FIG3
from regtopk.lab.experiments.paper.fig3_config import PRESETS, DeepConfig
from regtopk.lab.experiments.tasks.fig3_task import DeepTask, check_fits, make_network
from regtopk.lab.experiments.training.trainer import Trainer
from regtopk.lab.report import write_report
from regtopk.lab.runs import read_records

QUICK = DeepConfig(
    **{**PRESETS["smoke"], "preset": "smoke", "num_rounds": 6, "evaluate_every": 2, "methods": "topk,regtopk"}
)
MEASURED = ("method", "seed", "step", "accuracy", "test_loss", "loss", "payload_bytes")
INPUTS = {
    "cifar10": torch.zeros(2, 32, 32, 3),
    "digits": torch.zeros(2, 8, 8, 1),
    "text": torch.zeros(2, 128, dtype=torch.int64),
}


class StopHereError(Exception):
    pass


def run(config: DeepConfig, folder: Path, *, resume: bool = False) -> list[tuple[object, ...]]:
    FIG3.record(config, folder, command="regtopk reproduce fig3", resume=resume)
    return [tuple(r[name] for name in MEASURED) for r in read_records(folder)]


def run_until(config: DeepConfig, folder: Path, num_records: int) -> None:
    seen = []

    def progress(fraction: float, words: str = "") -> None:
        seen.extend([words] if ": accuracy" in words else [])  # what was measured
        if len(seen) == num_records:
            raise StopHereError

    with pytest.raises(StopHereError):
        FIG3.record(config, folder, command="regtopk reproduce fig3", progress=progress)


def count_rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever a training makes a round."""
    original, seen = Trainer._step, []

    def counted(trainer: Trainer) -> None:
        original(trainer)
        seen.append(trainer.num_steps)

    monkeypatch.setattr(Trainer, "_step", counted)
    return seen


# Each method has three evaluations of two seeds. Stopped at record 3 or 10, there is a checkpoint of round 2,
# of the first method and of the second; at record 6, one that does not fit: a seed of it is already finished.
@pytest.mark.parametrize(
    ("num_records", "num_left", "num_repeated", "settings"),
    [
        (6, 12, 2, {}),
        (3, 10, 0, {"local_steps": 3, "sends": "difference", "optimizer": "momentum"}),
        (3, 10, 0, {"optimizer": "adam", "lr": 0.01}),
        (10, 4, 1, {"methods": "adaptive:bytes_per_step=400,consensus"}),
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_bits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_records: int,
    num_left: int,
    num_repeated: int,
    settings: dict[str, object],
) -> None:
    config = replace(QUICK, **settings)  # type: ignore[arg-type]
    whole = run(config, tmp_path / "whole")
    run_until(config, tmp_path / "parts", num_records)
    rounds = count_rounds(monkeypatch)
    records = run(config, tmp_path / "parts", resume=True)
    assert sorted(set(records)) == sorted(whole)
    # from scratch, the same records would be there: only what had to be run again tells
    assert (len(rounds), len(records) - len(whole)) == (num_left, num_repeated)


def test_slices_add_to_one_folder_and_finished_runs_are_not_repeated(tmp_path: Path) -> None:
    run(replace(QUICK, methods="topk", seeds="1"), tmp_path)
    records = run(replace(QUICK, methods="regtopk,topk", seeds="0,3"), tmp_path, resume=True)
    ends = [r[:2] for r in records if r[2] == QUICK.num_rounds]
    assert sorted(ends) == [("regtopk", 0), ("regtopk", 3), ("topk", 0), ("topk", 3)]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {r["method"]: r["seeds"] for r in summary["results"]} == {"topk": [0, 3], "regtopk": [0, 3]}
    assert summary["results"][1]["difference_from_topk"]["seeds"] == [0, 3]


def test_seeds_side_by_side_are_the_seeds_alone(tmp_path: Path) -> None:
    together = run(replace(QUICK, seeds="3"), tmp_path / "together")
    alone = run(replace(QUICK, seeds="3", side_by_side=1), tmp_path / "alone")
    assert sorted(together) == sorted(alone)


def test_another_protocol_does_not_mix_with_a_folder(tmp_path: Path) -> None:
    run(replace(QUICK, methods="topk"), tmp_path)
    with pytest.raises(OutputError, match=r"lr must be 0\.2 as in the run that .* holds, got 0\.1"):
        run(replace(QUICK, lr=0.1), tmp_path, resume=True)
    with pytest.raises(OutputError, match="must not hold a run"):
        run(QUICK, tmp_path)


def test_other_data_do_not_mix_with_a_folder_even_after_a_slice_with_nothing_to_run(tmp_path: Path) -> None:
    texts = tmp_path / "a.txt", tmp_path / "b.txt"
    for path, line in zip(texts, ("one and two\n", "two and one\n"), strict=True):
        path.write_text(line * 500)
    config = replace(
        DeepConfig(**{**PRESETS["gpt"], "preset": "gpt"}),
        methods="topk", seeds="1", data=str(texts[0]), num_rounds=1, batch_size=1, num_workers=2,
    )  # fmt: skip
    run(config, tmp_path / "out")
    run(config, tmp_path / "out", resume=True)
    with pytest.raises(OutputError, match="examples must be"):
        run(replace(config, methods="dense", data=str(texts[1])), tmp_path / "out", resume=True)


def test_the_settings_of_a_folder_name_all_methods_and_seeds(tmp_path: Path) -> None:
    run(replace(QUICK, methods="topk", seeds="3-3"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["config"]["seeds"] == "3,"
    run(replace(QUICK, methods="regtopk", seeds="1"), tmp_path, resume=True)
    settings = json.loads((tmp_path / "config.json").read_text())["config"]
    assert (settings["methods"], settings["seeds"]) == ("topk,regtopk", "0,3,")


def test_a_torn_last_line_is_run_again(tmp_path: Path) -> None:
    config = replace(QUICK, methods="topk", seeds="1")
    whole = run(config, tmp_path)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    assert sorted(run(config, tmp_path, resume=True)[-len(whole) :]) == sorted(whole)


def poison_first_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DeepTask.grads

    def poisoned(task: DeepTask, models: Tensor, step: int, lr: float) -> tuple[Tensor, Tensor]:
        grads, losses = original(task, models, step, lr)
        grads[0] = torch.inf
        return grads, losses

    monkeypatch.setattr(DeepTask, "grads", poisoned)


def test_a_seed_that_diverges_is_said_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = run(QUICK, tmp_path / "healthy")
    poison_first_seed(monkeypatch)
    records = run(QUICK, tmp_path / "poisoned")
    assert [r for r in records if r[1] == 1] == [r for r in healthy if r[1] == 1]
    summary = json.loads((tmp_path / "poisoned" / "summary.json").read_text())
    assert [result["diverged"] for result in summary["results"]] == [[0], [0]]
    assert write_report(tmp_path / "poisoned").exists()


def test_at_equal_bytes_every_method_keeps_the_budget_and_the_best_is_tried_on_fresh_seeds(
    tmp_path: Path,
) -> None:
    methods = "topk:density=0.01:index_code=raw32:value_code=float32,topk,consensus,global-topk,dense"
    config = replace(QUICK, methods=methods, like="topk:0.01:raw32:float32", value_code="4bit", seeds="4")
    summary = FIG3.record(config, tmp_path, command="regtopk reproduce fig3")
    sizes = {r["method"]: r["payload_bytes_per_step"] for r in summary["results"]}
    budget = sizes["topk:density=0.01:index_code=raw32:value_code=float32"]
    assert budget == 8 * 195 + 32
    for method in ("topk", "global-topk"):
        assert 0.9 * budget < sizes[method] <= budget
    assert (
        0.7 * budget < sizes["consensus"] < 1.3 * budget
    )  # the size of a union is only known when it is met
    claim = summary["claim"]
    assert claim["method"] in ("topk", "consensus") and claim["gain"]["seeds"] == [2, 3]
    assert claim["against"] == summary["base"] == methods.split(",")[0]
    assert claim["bytes_per_step"][claim["method"]] <= 1.02 * budget
    assert summary["finding"].startswith("Within the same bytes (")


def test_a_new_run_does_not_go_on_from_an_old_checkpoint(tmp_path: Path) -> None:
    run_until(QUICK, tmp_path, 1)
    other = replace(QUICK, lr=0.01)
    FIG3.record(other, tmp_path, command="", force=True)
    forced = [tuple(r[name] for name in MEASURED) for r in read_records(tmp_path)]
    assert forced == run(other, tmp_path / "clean")


def test_a_network_that_does_not_take_the_data_is_refused_first(tmp_path: Path) -> None:
    for network in ("resnet18", "gpt"):
        with pytest.raises(
            ArgumentError, match=f"network must take examples of data_set 'digits', got '{network}'"
        ):
            FIG3.record(replace(QUICK, network=network), tmp_path / "out", command="")
    assert not (tmp_path / "out").exists()


def test_only_the_papers_protocol_is_compared_with_what_was_published() -> None:
    paper = DeepConfig(preset="paper", **PRESETS["paper"])
    assert paper.is_as_published and replace(paper, precision="float32", device="cuda").is_as_published
    assert not replace(paper, num_rounds=60).is_as_published
    assert not replace(paper, split="sorted:2").is_as_published


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"preset": "papers"}, r"preset must be one of .*did you mean 'paper'"),
        ({"network": "resnet"}, r"network must be one of .*did you mean 'resnet18'"),
        ({"sends": "gradient"}, r"sends must be one of"),
        ({"precision": "float16"}, r"precision must be one of float32, bfloat16"),
        ({"methods": "topk,topk"}, r"methods must be different"),
        ({"methods": ""}, r"at least one"),
        ({"seeds": "two"}, r"seeds must be a number of them, or different ones like 3,4,5 or 2-6, got 'two'"),
        ({"local_steps": 0}, r"local_steps must be an integer of at least 1, got 0"),
        ({"num_branches": -1}, r"num_branches must be an integer of at least 0, got -1"),
        ({"like": "topk:0.001"}, r"like must be NAME:DENSITY:INDEX_CODE:VALUE_CODE"),
        ({"split": "sort"}, r"split must be"),
        ({"data_set": "mnist"}, r"data_set must be one of cifar10, digits, text, got 'mnist'"),
        ({"sends": "difference", "optimizer": "adam"}, r"optimizer must be sgd or momentum"),
        ({"sends": "difference", "methods": "dense:optimizer=adamw"}, r"optimizer must be sgd or momentum"),
        ({"methods": "topk:exchange=updates"}, r"methods must exchange gradients here"),
        ({"data_set": "text", "split": "dirichlet"}, r"split must be iid, sorted or unequal for text"),
    ],
)
def test_bad_settings_are_refused(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(QUICK, **setting)  # type: ignore[arg-type]


def test_what_does_not_fit_leaves_no_folder(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"methods": "dense,topk:k=100000"}, "k must be at most the number of entries, J = 19546"),
        ({"split": "sorted:9999"}, "split='sorted:9999' need at least"),
        ({"data": "/nowhere"}, "digits come with scikit-learn and take no data, got '/nowhere'"),
    ]
    for setting, message in cases:
        with pytest.raises(ArgumentError, match=message):
            run(replace(QUICK, **setting), tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("preset", PRESETS)
def test_the_network_of_a_preset_takes_the_preset_data_and_its_methods_their_share(preset: str) -> None:
    config = DeepConfig(preset=preset, **PRESETS[preset])
    inputs, labels = INPUTS[config.data_set], torch.arange(50_000) % 10
    examples = Examples(inputs, labels, inputs, labels, labels, 10)
    network = make_network(config, 10, seed=0).to("meta")  # which has shapes, and takes no time
    scores = network(examples.read(inputs, config.image_size, torch.float32).to("meta"))
    assert scores.shape[-1] == 10
    check_fits(config, labels, sum(p.numel() for p in network.parameters()))
