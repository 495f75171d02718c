"""`regtopk train`: real processes, what they record, and what is refused before they start."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from regtopk.cli import app
from regtopk.core.codes import full_message_bytes
from regtopk.errors import ArgumentError, OracleError
from regtopk.lab.experiments.experiment import silent
from regtopk.lab.experiments.ranks.config import TrainConfig
from regtopk.lab.experiments.ranks.train import run
from regtopk.rounds import Rounds

NUMEL = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithms": "topk,dense:lr=0.1"}, "algorithms must not include dense, which is always there"),
        ({"densities": (0.1, 0.2)}, r"lr and density must be one number each, got \(0.4,\), \(0.1, 0.2\)"),
        ({"collective": "ring"}, "collective must be one of auto, all_gather, split, got 'ring'"),
        ({"task": "toy"}, "task must be one of digits, gpt, got 'toy'"),
        ({"split": "sorted"}, "split is a setting of regtopk compare alone, got 'sorted'"),
        ({"like": "topk:0.1:raw32:float32"}, "like is a setting of regtopk compare alone"),
        ({"data": "text.txt"}, "data must be empty for digits, which scikit-learn has, got 'text.txt'"),
        (
            {"algorithms": "topk:lr=0.1|0.2"},
            r"^options of a training must have one value each, got 'topk:lr=0.1\|0.2'$",
        ),
        ({"batch_size": 719}, "batch_size must be at most 718 for 1437 digits, got 719"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        TrainConfig(**settings)


def test_more_workers_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ArgumentError, match="num_workers must be at most 1, the GPUs here, got 2"):
        TrainConfig(device="cuda")


def test_an_oracle_is_refused_before_anything_starts() -> None:
    with pytest.raises(OracleError, match="'global-topk' peeks"):
        next(run(TrainConfig(algorithms="global-topk"), silent))


def test_the_defaults_are_what_we_advise() -> None:
    """docs/which-method.md: with SGD, and for a transformer with AdamW."""
    (digits,), (gpt,) = TrainConfig().methods, TrainConfig(task="gpt").methods
    assert (digits.algorithm, dict(digits.options)) == ("consensus", {"value_code": "4bit"})
    assert (gpt.algorithm, dict(gpt.options)) == ("topk", {"value_code": "4bit", "impute": 0.35})
    assert gpt.rounds == Rounds("updates", every=2, fragments=2) and TrainConfig().densities == (0.01,)


def test_records_are_made_at_both_ends_and_where_rounds_end() -> None:
    config = TrainConfig(algorithms="topk:exchange=updates:every=4", num_steps=28, num_evaluations=3)
    assert config.record_steps(config.methods[0]) == [0, 8, 16, 28]
    assert config.record_steps(config.trained[0]) == [0, 9, 19, 28]


def records_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("forked")
def test_command_trains_with_real_processes(tmp_path: Path) -> None:
    """At density 1 two ranks must train as DDP does, bit for bit; the bytes are those of the messages."""
    words = ["--algorithms", "regtopk,topk:density=0.01", "--density", "1.0", "--steps", "4"]
    words += ["--seeds", "2", "--set", "num_evaluations=2"]
    answer = CliRunner().invoke(app, ["train", *words, "--out", str(tmp_path / "run")])
    assert answer.exit_code == 0, answer.stderr
    assert "digits read right, %" in answer.stdout and "of which collective" in answer.stdout
    assert "regtopk plan says what they cost on your link." in answer.stdout
    received = f"each received {4e-6 * 4 * NUMEL:.2f} MB, 1 times as much"
    assert re.search(f"2 processes trained on digits for 4 steps. With regtopk .* {received}", answer.stdout)
    records = records_in(tmp_path / "run")
    curves = {
        method: [(r["step"], r["loss"], r["accuracy"]) for r in records if r["method"] == method]
        for method in ("dense", "regtopk", "topk:density=0.01")
    }
    assert [step for step, _, _ in curves["dense"]] == [0, 2, 4]
    assert curves["dense"] == curves["regtopk"] != curves["topk:density=0.01"]
    losses = [loss for _, loss, _ in curves["dense"]]
    assert all(loss[0] != loss[1] for loss in losses) and max(losses[-1]) < min(losses[0])
    codes = {"value_code": "float32", "index_code": "elias-fano"}
    message = full_message_bytes(NUMEL, NUMEL, dtype=torch.float32, **codes)
    of_a_step = {"dense": 4 * NUMEL, "regtopk": message}
    for r in [r for r in records if r["method"] in of_a_step]:
        assert r["sent_bytes"] == r["step"] * of_a_step[r["method"]]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["times_less_than_dense"]["regtopk"] == 4 * NUMEL / message
    assert all(summary[f"{phase}_s"]["regtopk"] > 0 for phase in ("select", "encode", "collective", "decode"))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["command"] == " ".join(["regtopk", "train", *words])
    page = (tmp_path / "run" / "index.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == 4 and "Accuracy, by bytes" in page


@pytest.mark.usefixtures("forked")
def test_command_trains_a_text_by_updates(tmp_path: Path) -> None:
    """Records say what was exchanged, where rounds ended, and the bytes of a message for each round."""
    (tmp_path / "text").write_text("".join(f"{n} is followed by {n + 1}.\n" for n in range(1500)))
    own = "topk:value_code=4bit:impute=0.35:exchange=updates:every=2"
    sizes = "num_layers=1", "width=16", "context=16", "batch_size=2", "num_evaluations=3"
    words = ["--task", "gpt", "--algorithms", own, "--steps", "8", "--data", str(tmp_path / "text")]
    words += [word for size in sizes for word in ("--set", size)]
    answer = CliRunner().invoke(app, ["train", *words, "--json", "--out", str(tmp_path / "run")])
    assert answer.exit_code == 0, answer.stderr
    summary, records = json.loads(answer.stdout), records_in(tmp_path / "run")
    steps = {method: [r["step"] for r in records if r["method"] == method] for method in ("dense", own)}
    assert steps == {"dense": [0, 3, 5, 8], own: [0, 2, 4, 8]}
    told = [(r["exchange"], r["every"], r["clipped"], r["optimizer"]) for r in (records[0], records[-1])]
    assert told[0] == ("gradients", 1, "the aggregate", "adamw")
    assert told[1] == ("updates", 2, "each worker's own", "adamw")
    dense, sent = (records[place]["sent_bytes"] for place in (3, 7))
    numel = int(dense) // (4 * 8)
    k = round(0.01 * numel)
    message = full_message_bytes(k, numel, dtype=torch.float32, value_code="4bit", index_code="elias-fano")
    assert sent == 4 * message and summary["times_less_than_dense"] == {own: dense / sent}
    for method in ("dense", own):
        first, *_, last = (r for r in records if r["method"] == method)
        assert last["test_loss"][0] < first["test_loss"][0] and 0 <= last["accuracy"][0] <= 100
        assert last["loss"][0] < first["loss"][0] and summary["test_loss"][method] == last["test_loss"][0]
    assert records[0]["test_loss"] == records[4]["test_loss"] and records[0]["loss"] == records[4]["loss"]


def test_a_text_that_is_too_short_is_refused_before_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abc" * 250)
    with pytest.raises(ArgumentError, match=r"num_workers=20 and split='iid' need at least 20 examples"):
        next(run(TrainConfig(task="gpt", data=str(tmp_path / "text"), num_workers=20), silent))
