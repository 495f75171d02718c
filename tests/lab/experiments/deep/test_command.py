"""regtopk reproduce fig3: the smoke preset as a user runs it, and what is refused."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from regtopk.cli import app

runner = CliRunner()


def test_the_smoke_preset_learns_and_is_added_to(tmp_path: Path) -> None:
    command = ["reproduce", "fig3", "--preset", "smoke", "--set", "num_rounds=60"]
    command += ["--out", str(tmp_path), "--json"]
    summary = json.loads(runner.invoke(app, command, catch_exceptions=False).stdout)
    assert {r["method"]: r["seeds"] for r in summary["results"]} == {
        "dense": [0, 1],
        "topk": [0, 1],
        "regtopk:mu=1": [0, 1],
    }
    assert all(r["mean"] > 90 and not r["diverged"] for r in summary["results"])
    topk = next(r["mean"] for r in summary["results"] if r["method"] == "topk")
    assert summary["finding"].startswith(f"RegTop-k against Top-k ({topk:.1f} %): regtopk:mu=1")
    assert (tmp_path / "index.html").exists()
    again = [*command, "--methods", "dense", "--resume"]
    assert json.loads(runner.invoke(app, again, catch_exceptions=False).stdout) == summary


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fig3", "--preset", "papr"], "preset must be one of"),
        (["fig3", "--methods", "topq"], "algorithm must be one of"),
        (["fig3", "--set", "deterministic=maybe"], "deterministic must be true or false"),
        (
            ["fig3", "--preset", "smoke", "--set", "preset=paper"],
            "preset must be given as the command's own argument",
        ),
        (["fig3"], "data must be given for cifar10"),
        (["fig3", "--preset", "smoke", "--resume", "--force"], "give one of --resume and --force, got both"),
        (["fig3", "--data", "nowhere.npz"], "nowhere.npz"),
        (["fig3", "--preset", "finetune", "--weights", "nowhere.pt"], "data must be given for cifar10"),
        (
            ["fig3", "--preset", "paper", "--weights", "published"],
            "weights 'published' are of efficientnet-lite0",
        ),
        (["fig1", "--preset", "paper"], "preset must not be given for fig1, which has none, got 'paper'"),
        (
            ["fig1", "--methods", "topk"],
            "one of num_iterations, lr, mu, w_1, device, got 'methods'",
        ),
    ],
)
def test_bad_words_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    found = runner.invoke(app, ["reproduce", *words, "--out", str(tmp_path / "out")])
    assert found.exit_code == 2
    assert message in found.stderr
    assert not (tmp_path / "out").exists()
