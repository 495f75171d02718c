import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from regtopk.cli import app
from regtopk.core.codes import full_message_bytes
from regtopk.errors import ArgumentError, OracleError
from regtopk.lab.experiments import parse_settings
from regtopk.lab.experiments.experiment import silent
from regtopk.lab.experiments.train import run
from regtopk.lab.experiments.train_config import DENSE, TrainConfig
from regtopk.rounds import Rounds

NUMEL = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm=dense", "algorithm must not be dense, .*, unless it exchanges updates, got 'dense'"),
        ("algorithm=dense:lr=0.1", "algorithm must not be dense, .*, unless it exchanges updates, got"),
        ("algorithm=topk:lr=x", "lr must be a number, got 'topk:lr=x'"),
        ("algorithm=topk:index_code=x", "index_code must be one of"),
        ("algorithm=topk:optimizer=sgdx", "optimizer must be one of .*did you mean 'sgd"),
        ("algorithm=topk,regtopk", "algorithm must be one of"),
        ("algorithm=topk:every=2", "every must stand with exchange=updates, got 'topk:every=2'"),
        ("algorithm=reg-topk", r"algorithm must be one of dense, .*got 'reg-topk' \(did you mean 'regtopk'"),
        ("algorithm=regtopk:mu=0", "mu must be positive and finite, got 0"),
        ("density=2", r"density must be in \(0, 1\], got 2.0"),
        ("value_code=3bit", "value_code must be one of float32, .*, got '3bit'"),
        ("collective=ring", "collective must be one of auto, all_gather, split, got 'ring'"),
        ("task=mnist", "task must be one of digits, gpt, got 'mnist'"),
        ("exchange=weights", "exchange must be one of gradients, updates, got 'weights'"),
        ("every=2", "every must stand with exchange=updates, got 'regtopk:every=2'"),
        ("outer=nesterov", "outer must stand with exchange=updates, got"),
        ("index_code=x", "index_code must be one of"),
        ("optimizer=sgdx", "optimizer must be one of"),
        ("width=64", "width must not be given for digits, whose network is fixed, got 64"),
        ("data=text.txt", "data must be empty for digits, which scikit-learn has, got 'text.txt'"),
        ("record_every=-1", "record_every must be an integer of at least 1, got -1"),
        ("num_workers=1", "num_workers must be an integer of at least 2, got 1"),
        ("num_steps=-1", "num_steps must be an integer of at least 1, got -1"),
        ("batch_size=719", r"batch_size must be at most 718 \(1437 training digits, 2 workers\), got 719"),
        ("lr=-1", "lr must be positive and finite, got -1.0"),
        ("device=tpu", "device must be cpu or cuda, got 'tpu'"),
    ],
)
def test_bad_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_settings(TrainConfig, [setting])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["algorithm=topk:exchange=updates:every=2", "every=3"],
            "every must be the same as option and as word of the algorithm, got 3 and 'topk:exchange=upd",
        ),
        (["algorithm=topk:exchange=updates", "exchange=gradients"], "exchange must be the same as option"),
        (["algorithm=topk:exchange=gradients", "exchange=updates"], "exchange must be the same as option"),
        (
            ["exchange=updates", "every=7"],
            "every must divide the number of steps, 300, got 'topk:value_code=4bit",
        ),
        (["exchange=updates", "outer_lr=0.5"], "outer_lr and outer_momentum need an outer other than none"),
        (["task=gpt", "width=100"], "width must be a multiple of 64, or smaller, got 100"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_settings(TrainConfig, settings)


def test_options_and_words_say_the_same() -> None:
    by_options = parse_settings(
        TrainConfig, ["algorithm=topk", "exchange=updates", "every=2", "outer=nesterov", "outer_lr=0.5"]
    )
    by_words = TrainConfig(algorithm="topk:exchange=updates:every=2:outer=nesterov:outer_lr=0.5")
    assert by_options.method == by_words.method
    assert by_words.method.rounds == Rounds("updates", 2, "nesterov", 0.5)
    agreeing = TrainConfig(algorithm="topk:exchange=updates:every=2", exchange="updates", every=2)
    assert agreeing.method.label == "topk:exchange=updates:every=2"
    assert TrainConfig(algorithm="topk", exchange="gradients").method.label == "topk"


def test_more_workers_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ArgumentError, match="num_workers must be at most the number of GPUs, 1, got 2"):
        TrainConfig(device="cuda")


def test_an_oracle_is_refused_before_anything_starts() -> None:
    with pytest.raises(OracleError, match="peeks"):
        next(run(TrainConfig(algorithm="global-topk"), silent))


def test_records_are_made_at_both_ends() -> None:
    config = TrainConfig(num_steps=25, record_every=10)
    assert config.record_steps(config.method) == [0, 10, 20, 25]


def test_records_are_made_where_rounds_end() -> None:
    config = TrainConfig(exchange="updates", every=4, num_steps=28, record_every=10)
    assert config.record_steps(config.method) == [0, 8, 20, 28]
    assert config.record_steps(DENSE) == [0, 10, 20, 28]


def test_command_trains_with_real_processes(tmp_path: Path) -> None:
    """At density 1 two ranks must train as DDP does, bit for bit; the bytes are those of the messages."""
    words = [
        "--density",
        "1.0",
        "--steps",
        "4",
        "--seeds",
        "2",
        "--set",
        "record_every=2",
    ]
    answer = CliRunner().invoke(app, ["train", *words, "--out", str(tmp_path / "run")])
    assert answer.exit_code == 0, answer.stderr
    assert "digits read right, %" in answer.stdout and "of which collective" in answer.stdout
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    curves = {
        method: [(r["step"], r["loss"], r["accuracy"]) for r in records if r["method"] == method]
        for method in ("dense", "regtopk")
    }
    assert [step for step, _, _ in curves["dense"]] == [0, 2, 4]
    assert curves["dense"] == curves["regtopk"]
    losses = [loss for _, loss, _ in curves["dense"]]
    assert all(loss[0] != loss[1] for loss in losses) and max(losses[-1]) < min(losses[0])
    message = full_message_bytes(
        NUMEL, NUMEL, dtype=torch.float32, value_code="float32", index_code="elias-fano"
    )
    of_a_step = {"dense": 4 * NUMEL, "regtopk": message}
    for r in records:
        assert r["sent_bytes"] == r["step"] * of_a_step[r["method"]]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["times_less_than_dense"] == {"regtopk": 4 * NUMEL / message}
    assert summary["sent_bytes_until_target"] == {"dense": None, "regtopk": None}
    assert all(summary[f"{phase}_s"]["regtopk"] > 0 for phase in ("select", "encode", "collective", "decode"))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["command"] == " ".join(["regtopk", "train", *words])
    page = (tmp_path / "run" / "index.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == 4 and "Accuracy, by bytes" in page


def test_command_trains_a_text_by_updates(tmp_path: Path) -> None:
    """Records say what was exchanged, where rounds ended, and the bytes of a message for each round."""
    (tmp_path / "text").write_text("".join(f"{n} is followed by {n + 1}.\n" for n in range(1500)))
    sizes = "num_layers=1", "width=16", "context=16", "batch_size=2", "record_every=3"
    words = ["--task", "gpt", "--exchange", "updates", "--every", "2", "--steps", "8"]
    typed = [*words, "--data", str(tmp_path / "text"), *(word for size in sizes for word in ("--set", size))]
    answer = CliRunner().invoke(app, ["train", *typed, "--json", "--out", str(tmp_path / "run")])
    assert answer.exit_code == 0, answer.stderr
    summary = json.loads(answer.stdout)
    own = "topk:value_code=4bit:impute=0.35:exchange=updates:every=2"
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {method: [r["step"] for r in records if r["method"] == method] for method in ("dense", own)}
    assert steps == {"dense": [0, 3, 6, 8], own: [0, 2, 6, 8]}
    assert [r["exchange"] for r in records] == ["gradients"] * 4 + ["updates"] * 4
    assert (records[-1]["every"], records[-1]["optimizer"], records[-1]["lr"]) == (2, "adamw", 0.004)
    assert records[-1]["clipped"] == "each worker's own" and records[0]["clipped"] == "the aggregate"
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


def test_a_text_that_is_not_there_is_refused_before_ranks_start(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"text must be a file, got .*nothing there"):
        next(run(TrainConfig(task="gpt", data=str(tmp_path / "text")), silent))
    (tmp_path / "text").write_text("abc" * 250)
    with pytest.raises(ArgumentError, match=r"num_workers=20 and split='iid' need at least 20 examples"):
        next(run(TrainConfig(task="gpt", data=str(tmp_path / "text"), num_workers=20), silent))
