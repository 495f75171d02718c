"""The race of the GPT, short: real ranks on a relayed link learn what the simulator recorded, bit for bit."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.slow_network.__main__ import main
from benchmarks.slow_network.delays import BYTES_PER_PARAMETER, VALUE_CODE, num_entries
from benchmarks.slow_network.gpt_picked import Picked, loss_at, read_picked
from benchmarks.slow_network.gpt_table import table
from regtopk.core.codes import full_message_bytes
from regtopk.core.traffic import all_reduce_bytes
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.comparison import COMPARE
from regtopk.lab.experiments.compare.config import CompareConfig

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SEARCHED = "topk:value_code=4bit:exchange=updates:every=2:lr=0.1|0.2"
METHODS = (
    "dense",
    SEARCHED,
    "topk:value_code=4bit:exchange=updates:every=4:delay=1:fragments=2",
    "sparseloco:value_code=2bit:exchange=updates:every=2",
    "dense:value_code=2bit:sum_code=2bit:exchange=updates:every=4:outer=nesterov",
    "topk:value_code=sign:index_code=rice:returned=0.2:exchange=updates:every=2:fragments=2:outer=nesterov",
)


@pytest.fixture(scope="module")
def picked(text_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("picked")
    config = CompareConfig(
        task="gpt", num_workers=2, num_steps=12, batch_size=2, num_layers=1, width=16, context=16,
        seeds="1-1", num_evaluations=4, lr=(0.1,), densities=(0.05,), data=text_file,
        algorithms=",".join(METHODS),
    )  # fmt: skip
    COMPARE.record(config, folder, command="")
    return folder


def test_the_race(picked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, out = read_picked([picked]), tmp_path / "race.json"
    words = ["gpt", "--picked", str(picked), "--out", str(out), "--shaper", "relay", "--target-at", "0.5"]
    words += ["--latency", "2ms", "--calibration", str(RESULTS / "slow-network-calibration-2.json")]
    assert main([*words, "--only", SEARCHED]) == 0
    (alone,) = json.loads(out.read_text())["race"]
    target = recorded.target("dense", 0.5)
    assert alone["curve"][-1][2] <= target < alone["curve"][-2][2] and not alone["is_computed"]
    assert alone["reached_steps"] == pytest.approx(alone["needed_steps"])
    assert 0 < alone["reached_s"] <= alone["curve"][-1][1] and alone["predicted_s"] > 0

    assert main([*words, "--timed-steps", "4", "--most-seconds", "0.001"]) == 0
    content = json.loads(out.read_text())
    rows = {row["method"]: row for row in content["race"]}
    assert rows[SEARCHED] == alone and set(rows) == set(METHODS)  # it was not run again
    for method in recorded.methods:
        losses, off = dict(method.curves[1]), 0.01 if method.is_plain else 0.0  # DDP's are in bfloat16
        for step, _, loss in rows[method.label]["curve"]:
            assert abs(loss - losses[step]) <= off, method.label
    dense = rows["dense"]
    assert dense["is_computed"] and dense["timed_steps"] == 4 and dense["needed_steps"] == pytest.approx(6)
    assert dense["reached_s"] == pytest.approx(6 * dense["step_s"])
    payload = all_reduce_bytes(2 * dense["params"], 2)
    assert payload < dense["sent_bytes_per_step"] < 1.2 * payload > 5 * alone["sent_bytes_per_step"]
    assert rows[METHODS[3]]["predicted_s"] is None  # the planner does not know it
    assert content["settings"]["target"] == target and content["shaper"] == "relay"
    shown = capsys.readouterr().out
    assert table(content) in shown and "timed 4 steps, 6 needed" in shown

    assert main([*words, "--only", "muon"]) == 1
    assert "only must be recorded methods, of ['dense'" in capsys.readouterr().err
    assert main([*words, "--target-at", "0.6"]) == 1
    assert f"out must hold results of the same race, but {out} has another" in capsys.readouterr().err


def test_what_was_picked(picked: Path) -> None:
    recorded = read_picked([picked, picked])
    assert [method.label for method in recorded.methods] == list(METHODS)
    searched = recorded.methods[1].method
    assert searched.lr in (0.1, 0.2) and searched.options["density"] == 0.05 and searched.rounds.every == 2
    assert [method.is_plain for method in recorded.methods] == [True] + 5 * [False]
    with pytest.raises(ArgumentError, match=r"target-of must be a recorded method, one of .* got 'muon'"):
        recorded.target("muon", 0.75)


def test_folders_of_different_trainings(picked: Path, tmp_path: Path) -> None:
    header = json.loads((picked / "config.json").read_text())
    header["config"]["width"] = 32
    (tmp_path / "config.json").write_text(json.dumps(header))
    with pytest.raises(ArgumentError, match="picked must share width, got 16 and 32 in "):
        read_picked([picked, tmp_path])


def test_another_text(picked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt", "--picked", str(picked), "--data", __file__]) == 1
    assert "data must be the text of the record, whose hash is" in capsys.readouterr().err


def test_losses_between_evaluations() -> None:
    curve = [(0, 4.0), (10, 3.0), (20, 2.0)]
    assert [loss_at(curve, step) for step in (5, 10, 15, 20)] == [3.5, 3.0, 2.5, 2.0]
    method = Picked("dense", "dense:lr=0.1", {1: curve})
    assert method.steps_to(2.5, 1) == 15 and method.steps_to(1.0, 1) == float("inf")


def test_entries_that_fill_the_bytes() -> None:
    numel, codes = 3_000_000, {"value_code": VALUE_CODE, "index_code": "elias-fano"}
    for every in (2, 4):
        k = num_entries(numel, every)
        sizes = [full_message_bytes(n, numel, dtype=torch.float32, **codes) for n in (k, k + 1)]
        assert sizes[0] <= BYTES_PER_PARAMETER * every * numel < sizes[1]
