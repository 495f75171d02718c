"""Slices of a comparison: what runs, what is kept, and what is refused before there is a folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from regtopk.cli import app
from regtopk.errors import ArgumentError, OutputError
from regtopk.lab.experiments.compare import comparison
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.paper.fig3 import FIG3, PRESETS
from regtopk.lab.experiments.tasks import Problem
from regtopk.lab.experiments.tasks.deep import DeepTask
from regtopk.lab.experiments.training.trainer import Trainer
from regtopk.lab.report import write_report
from regtopk.lab.runs import read_records

SHORT: dict[str, Any] = {"num_steps": 4, "num_evaluations": 2, "seeds": "1", "batch_size": 8}
QUICK = CompareConfig(**{**PRESETS["smoke"], **SHORT, "algorithms": "topk,regtopk"})
MEASURED = ("method", "seed", "step", "accuracy", "test_loss", "loss", "payload_bytes")


def run(config: CompareConfig, folder: Path, *, resume: bool = False) -> list[tuple[Any, ...]]:
    FIG3.record(config, folder, command="c", resume=resume)
    return [tuple(r[name] for name in MEASURED) for r in read_records(folder)]


@pytest.mark.parametrize("words", ["", ":exchange=updates:every=4/4/4/4:fragments=2:delay=1:outer=nesterov"])
def test_an_interrupted_run_goes_on_in_its_middle_to_the_same_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """A slice of another method between leaves the checkpoint; a torn last line is dropped."""
    config = replace(
        QUICK, algorithms=f"topk,regtopk{words}", seeds="2", num_steps=8, num_evaluations=4, optimizer="adam"
    )
    stopped = 0.9 if words else 0.8  # of both methods: in the second, at step 6 or before it
    monkeypatch.setattr(comparison, "EVERY_S", 0.0)

    def progress(fraction: float, words: str = "") -> None:
        if fraction > stopped:
            raise KeyboardInterrupt

    whole = run(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        FIG3.record(config, tmp_path / "parts", command="c", progress=progress)
    metrics = tmp_path / "parts" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"method": "regt')
    run(replace(config, algorithms="dense"), tmp_path / "parts", resume=True)
    steps: list[int] = []
    original = Trainer._step

    def counted(trainer: Trainer) -> None:
        steps.append(trainer.num_steps)
        original(trainer)

    monkeypatch.setattr(Trainer, "_step", counted)
    records = run(config, tmp_path / "parts", resume=True)
    assert [r for r in records if r[0] != "dense"] == whole
    assert steps == ([6, 7] if words else [4, 5, 6, 7])
    assert not list((tmp_path / "parts").glob("checkpoint-*"))


def test_seeds_side_by_side_are_the_seeds_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = run(replace(QUICK, seeds="3"), tmp_path / "together")
    monkeypatch.setattr(QUICK.kind, "num_at_once", 1)
    assert sorted(run(replace(QUICK, seeds="3"), tmp_path / "alone")) == sorted(together)


def test_another_protocol_does_not_mix_with_a_folder(tmp_path: Path) -> None:
    run(replace(QUICK, algorithms="topk"), tmp_path)
    with pytest.raises(OutputError, match=r"lr must be \[0\.2\] as in the run that .* holds, got \[0\.1\]"):
        run(replace(QUICK, lr=(0.1,)), tmp_path, resume=True)
    with pytest.raises(ArgumentError, match="methods must be different and at least one, got 'topk,topk:lr="):
        run(replace(QUICK, algorithms="topk:lr=0.2"), tmp_path, resume=True)


def test_a_folder_that_holds_a_run_is_refused_before_the_data_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(QUICK, tmp_path)
    monkeypatch.setattr(comparison, "Problem", lambda config: pytest.fail("read the data"))
    with pytest.raises(OutputError, match="must not hold a run"):
        run(QUICK, tmp_path)


def test_a_slice_that_ends_while_another_reads_the_data_stays_in_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(replace(QUICK, algorithms="topk"), tmp_path)

    def load_slowly(config: CompareConfig) -> Problem:
        problem = Problem(config)
        monkeypatch.setattr(comparison, "Problem", Problem)
        run(replace(QUICK, algorithms="dense", seeds="5,"), tmp_path, resume=True)
        return problem

    monkeypatch.setattr(comparison, "Problem", load_slowly)
    FIG3.record(replace(QUICK, algorithms="regtopk"), tmp_path, command="slow", resume=True)
    header = json.loads((tmp_path / "config.json").read_text())
    assert header["command"].split() == ["c", "slow"]
    assert (header["config"]["algorithms"], header["config"]["seeds"]) == ("topk,dense,regtopk", "0,5,")


@pytest.mark.usefixtures("undrawn")
def test_a_seed_that_diverges_is_said_and_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(QUICK, algorithms="topk,consensus", seeds="2")  # side by side, and one after another
    healthy = run(config, tmp_path / "healthy")
    original = DeepTask.grads

    def poisoned(task: DeepTask, models: Tensor, step: int) -> tuple[Tensor, Tensor]:
        grads, losses = original(task, models, step)
        grads[0] = torch.inf
        return grads, losses

    monkeypatch.setattr(DeepTask, "grads", poisoned)
    records = run(config, tmp_path / "poisoned")
    assert [r for r in records if r[1] == 1] == [r for r in healthy if r[1] == 1]
    summary = json.loads((tmp_path / "poisoned" / "summary.json").read_text())
    assert [result["diverged"] for result in summary["results"]] == [[0], [0]] and "finding" not in summary
    assert write_report(tmp_path / "poisoned").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "sorted:9999"}, "split='sorted:9999' need at least"),
        ({"data": "/nowhere"}, "digits come with scikit-learn and take no data, got '/nowhere'"),
        (
            {"algorithms": "topk,consensus", "like": "topk:0.0001:raw32:float32"},
            "bytes per step must be at least .*, the smallest message of consensus, got",
        ),
        (
            {"algorithms": "topk:returned=0.5", "received_bytes_per_step": 2000.0},
            "bytes per step must be at least .*, what comes back alone of topk:returned=0.5, got 2000",
        ),
    ],
)
def test_what_does_not_fit_leaves_no_folder(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        run(replace(QUICK, **settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison.Comparison, "record", interrupted)
    words = ["reproduce", "fig3", "--preset", "smoke", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, words).stderr == "regtopk: interrupted\n"
    (tmp_path / "config.json").touch()
    done = CliRunner().invoke(app, words)
    advice = f"regtopk: {tmp_path} keeps what is done; --resume goes on from there\n"
    assert (done.exit_code, done.stderr) == (130, f"{advice}regtopk: interrupted\n")
