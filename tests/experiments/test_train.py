import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from regtopk.cli import app
from regtopk.core.codes import full_message_bytes
from regtopk.errors import ArgumentError, OracleError
from regtopk.experiments import parse_settings
from regtopk.experiments.experiment import silent
from regtopk.experiments.train import TrainConfig, record_steps, run, summarise

NUMEL = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("algorithm=dense", "algorithm must not be dense, which is always there, got 'dense'"),
        ("algorithm=topk:exchange=updates", "options of its own alone .* got 'topk:exchange=updates'"),
        ("algorithm=topk:lr=0.1", "algorithm must have options of its own alone here, no lr"),
        ("algorithm=reg-topk", r"algorithm must be one of dense, .*got 'reg-topk' \(did you mean 'regtopk'"),
        ("algorithm=regtopk:mu=0", "mu must be positive and finite, got 0"),
        ("density=2", r"density must be in \(0, 1\], got 2.0"),
        ("value_code=3bit", "value_code must be one of float32, .*, got '3bit'"),
        ("scope=layer", "scope must be one of model, bucket, got 'layer'"),
        ("dataset=mnist", "dataset must be one of digits, got 'mnist'"),
        ("num_workers=1", "num_workers must be an integer of at least 2, got 1"),
        ("num_steps=0", "num_steps must be an integer of at least 1, got 0"),
        ("batch_size=719", r"batch_size must be at most 718 \(1437 training digits, 2 workers\), got 719"),
        ("lr=0", "lr must be positive and finite, got 0.0"),
        ("device=tpu", "device must be cpu or cuda, got 'tpu'"),
    ],
)
def test_bad_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_settings(TrainConfig, [setting])


def test_more_workers_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ArgumentError, match="num_workers must be at most the number of GPUs, 1, got 2"):
        TrainConfig(device="cuda")


def test_an_oracle_is_refused_before_anything_starts() -> None:
    with pytest.raises(OracleError, match="'global-topk' peeks"):
        next(run(TrainConfig(algorithm="global-topk"), silent))


def test_records_are_made_at_both_ends() -> None:
    assert record_steps(TrainConfig(num_steps=25, record_every=10)) == [0, 10, 20, 25]


def test_command_trains_with_real_processes(tmp_path: Path) -> None:
    """At density 1 two ranks must train as DDP does, bit for bit; the bytes are those of the messages."""
    words = [
        "--density",
        "1.0",
        "--scope",
        "bucket",
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
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["command"] == " ".join(["regtopk", "train", *words])
    page = (tmp_path / "run" / "index.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == 4 and "Accuracy, by bytes" in page


def test_bytes_are_those_of_the_messages() -> None:
    config = TrainConfig(algorithm="topk:density=0.02", value_code="4bit", num_steps=3, record_every=3)
    records = list(run(config, silent))
    k = round(0.02 * NUMEL)
    message = full_message_bytes(k, NUMEL, dtype=torch.float32, value_code="4bit", index_code="elias-fano")
    assert [r["sent_bytes"] for r in records] == [0, 3 * 4 * NUMEL, 0, 3 * message]
    summary = summarise(config, records)
    assert summary["times_less_than_dense"] == {"topk": 4 * NUMEL / message}
    assert summary["sent_bytes_until_target"] == {"dense": None, "topk": None}
    assert all(summary[phase]["topk"] > 0 for phase in ("select_s", "encode_s", "collective_s", "decode_s"))
