"""`regtopk reproduce fig3`: its presets, the published curve, and the smoke preset as a user runs it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from regtopk.cli import app
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.networks.convolutional import NETWORKS
from regtopk.lab.experiments.paper.fig3 import FIG3, PRESETS, is_as_published, published_accuracy
from regtopk.lab.method import Method

PAPER = CompareConfig(**PRESETS["paper"])
runner = CliRunner()


def test_only_the_papers_protocol_is_compared_with_what_was_published() -> None:
    assert is_as_published(PAPER) and is_as_published(replace(PAPER, precision="float32", device="cuda"))
    assert not is_as_published(replace(PAPER, num_steps=60))
    assert not is_as_published(replace(PAPER, split="sorted:2"))
    assert "published" in published_accuracy(PAPER, Method.parse("topk"), 2520)
    assert published_accuracy(PAPER, Method.parse("regtopk:mu=1"), 2520) == {}
    assert FIG3.panels(PAPER)[0].dots == "published"
    assert FIG3.panels(replace(PAPER, lr=(1.0,)))[0].dots is None


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_evaluates_at_round_steps_and_its_network_takes_its_images(preset: str) -> None:
    config = CompareConfig(**PRESETS[preset])
    assert len(config.stops) == config.num_evaluations + 1 and config.stops[-1] == config.num_steps
    network = NETWORKS[config.kind.architecture](10).to("meta")  # type: ignore[attr-defined]
    size = {"cifar10": (2, 3, 32, 32), "digits": (2, 1, 8, 8)}[config.kind.data_set]  # type: ignore[attr-defined]
    assert network(torch.zeros(size, device="meta")).shape == (2, 10)
    assert replace(config, like="topk:0.001:raw32:float32").is_at_equal_bytes  # as the recorded ones ran


@pytest.mark.usefixtures("undrawn")
def test_the_smoke_preset_learns_and_is_added_to(tmp_path: Path) -> None:
    command = ["reproduce", "fig3", "--preset", "smoke", "--set", "num_steps=24", "--deterministic"]
    command += ["--set", "num_evaluations=8", "--out", str(tmp_path), "--json"]
    summary = json.loads(runner.invoke(app, command, catch_exceptions=False).stdout)
    seeds = {r["method"]: r["seeds"] for r in summary["results"]}
    assert seeds == {"dense": [0, 1], "topk": [0, 1], "regtopk:mu=1": [0, 1]}
    assert all(r["mean"] > 90 and not r["diverged"] for r in summary["results"])
    assert (tmp_path / "index.html").exists()
    header = json.loads((tmp_path / "config.json").read_text())
    assert "--deterministic" in header["command"] and header["config"]["deterministic"]
    again = [*command, "--algorithms", "dense", "--resume"]
    assert json.loads(runner.invoke(app, again, catch_exceptions=False).stdout) == summary
