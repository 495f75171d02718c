"""What a folder of deep trainings says of itself, and what is refused before there is one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from regtopk.cli import app
from regtopk.errors import ArgumentError, OutputError
from regtopk.lab.experiments.paper.fig3 import FIG3
from regtopk.lab.experiments.paper.fig3_config import PRESETS, DeepConfig
from regtopk.lab.experiments.tasks.fig3_task import DeepProblem

QUICK = DeepConfig(
    **{
        **PRESETS["smoke"],
        "preset": "smoke",
        "num_rounds": 2,
        "evaluate_every": 1,
        "methods": "topk",
        "seeds": "1",
    }
)


def header_of(config: DeepConfig, folder: Path) -> dict[str, Any]:
    FIG3.record(config, folder, command="c")
    header: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return header


def test_a_run_in_progress_is_neither_joined_nor_replaced(tmp_path: Path) -> None:
    def progress(fraction: float, words: str = "") -> None:
        for resume in (True, False):
            with pytest.raises(OutputError, match="must not be written by another process"):
                FIG3.record(QUICK, tmp_path, command="", resume=resume, force=not resume)

    summary = FIG3.record(QUICK, tmp_path, command="", progress=progress)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_a_slice_that_ends_while_another_reads_the_data_stays_in_the_settings(
    tmp_path: Path,
) -> None:
    FIG3.record(QUICK, tmp_path, command="a")

    def load_slowly(config: DeepConfig) -> DeepProblem:
        problem = DeepProblem(config)
        FIG3.record(replace(QUICK, methods="dense", seeds="5,"), tmp_path, command="b", resume=True)
        return problem

    slow = replace(FIG3, load=load_slowly)
    slow.record(replace(QUICK, methods="regtopk"), tmp_path, command="c", resume=True)
    header = json.loads((tmp_path / "config.json").read_text())
    assert header["command"].split() == ["a", "b", "c"]
    assert (header["config"]["methods"], header["config"]["seeds"]) == ("topk,dense,regtopk", "0,5,")


def test_bytes_too_few_for_a_method_leave_no_folder(tmp_path: Path) -> None:
    base = "topk:density=0.0001:index_code=raw32:value_code=float32"
    config = replace(QUICK, methods=f"{base},consensus", like="topk:0.0001:raw32:float32")
    with pytest.raises(
        ArgumentError, match="bytes per step must be at least the smallest message of consensus"
    ):
        FIG3.record(config, tmp_path / "out", command="")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("methods", "settings"),
    [
        ("topk,topk:lr=0.2", {}),
        ("topk,topk:density=0.01", {}),
        ("regtopk:mu=1,regtopk:mu=1.0", {}),
        ("topk,topk:value_code=4bit", {"value_code": "4bit"}),
    ],
)
def test_one_method_in_two_spellings_is_refused(methods: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="methods must be different"):
        replace(QUICK, methods=methods, **settings)


def test_at_equal_bytes_an_open_density_is_another_method() -> None:
    replace(QUICK, methods="topk,topk:density=0.01", like="topk:0.01:raw32:float32")


def test_title_and_description_say_what_was_changed(tmp_path: Path) -> None:
    plain = header_of(
        replace(QUICK, **{key: PRESETS["smoke"][key] for key in ("evaluate_every",)}), tmp_path / "a"
    )
    assert plain["title"] == "Deep networks: smoke, num_rounds=2"
    assert "Accuracy is the last evaluation on the test set" in plain["about"]
    assert "Batch norm is evaluated with the statistics of (up to) 2,000 training images" in plain["about"]
    coded = header_of(replace(QUICK, value_code="4bit", uniform_weights=True), tmp_path / "b")
    assert coded["title"] == "Deep networks: smoke, value_code=4bit, uniform_weights, num_rounds=2"
    assert "mean of the last 2 evaluations" in coded["about"]


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regtopk.lab.experiments.compare.comparison.Comparison.record", interrupted)
    words = ["reproduce", "fig3", "--preset", "smoke", "--out", str(tmp_path)]
    nothing = CliRunner().invoke(app, words)
    assert (nothing.exit_code, nothing.stderr) == (130, "regtopk: interrupted\n")
    (tmp_path / "config.json").touch()
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-2:] == [
        f"regtopk: {tmp_path} keeps what is done; --resume goes on from there",
        "regtopk: interrupted",
    ]


def test_a_folder_that_is_taken_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    done = CliRunner().invoke(app, ["reproduce", "fig3", "--preset", "smoke", "--out", str(tmp_path)])
    advice = "holds config.json: choose another --out, go on with --resume, or replace it with --force\n"
    assert done.exit_code == 2 and done.stderr.endswith(advice)


def test_the_command_says_what_came_out_and_is_kept_as_typed(tmp_path: Path) -> None:
    words = ["reproduce", "fig3", "--preset", "smoke", "--set", "num_rounds=2", "--set", "evaluate_every=1"]
    words += ["--seeds", "1", "--methods", "topk,regtopk"]
    for flags, kept in ((["--deterministic"], True), (["--set", "deterministic=false"], False)):
        folder = tmp_path / str(kept)
        done = CliRunner().invoke(app, [*words, *flags, "--out", str(folder)], catch_exceptions=False)
        assert done.stdout.startswith("RegTop-k against Top-k (")
        assert "diverged" not in done.stdout  # which none did
        header = json.loads((folder / "config.json").read_text())
        assert ("--deterministic" in header["command"].split()) == header["config"]["deterministic"] == kept
