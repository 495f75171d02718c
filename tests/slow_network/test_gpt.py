"""The race of the GPT, short: the training does not depend on the link; and what the tables say."""

import json
import pydoc_data.topics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.slow_network.__main__ import links_of, main
from benchmarks.slow_network.gpt_methods import BYTES_PER_PARAMETER, EVERY, VALUE_CODE, num_entries
from benchmarks.slow_network.gpt_plan import QUICK
from benchmarks.slow_network.gpt_race import GptRace
from benchmarks.slow_network.gpt_tables import computed_s, first_at, summarise, tables
from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.options import parser
from regtopk.core.codes import full_message_bytes
from regtopk.errors import ArgumentError
from tests.slow_network.network import needs_namespaces

TEXT = pydoc_data.topics.__file__  # short: every rank reads it


@needs_namespaces
def test_the_link_changes_no_bit_of_the_training() -> None:
    """So the steps of an unshaped training, times a step's time on a link, are its time on that link."""
    run = {"lr": 0.004, "seed": 0, "target": None, "batch_size": 1, "stretch": 16, "num_steps": 16}
    runs = [
        {**run, "method": method, "bandwidth_bits_per_s": link}
        for method in (*EVERY, "updates:4:delay=1:fragments=2")
        for link in (None, 100e6)
    ]
    with links_of(2) as links:
        job = {"plan": asdict(QUICK), "runs": runs, "latency_s": 0.0, "data": TEXT}
        rows = list(launch("benchmarks.slow_network.gpt_training", job, links))
    for unshaped, shaped in zip(rows[::2], rows[1::2], strict=True):
        assert (unshaped["bandwidth_bits_per_s"], shaped["bandwidth_bits_per_s"]) == (None, 100e6)
        assert unshaped["curve"][-1][1] == shaped["curve"][-1][1] < 4.4, unshaped["method"]
    sent = {row["method"]: row["sent_bytes"] for row in rows}
    assert sent["dense"] == 4 * rows[0]["params"] == 2 * sent["fp16"] > 5 * sent["powersgd"]
    for method in ("updates:2", "updates:4"):
        assert 0.95 < sent[method] / (BYTES_PER_PARAMETER * rows[0]["params"]) <= 1


@needs_namespaces
@pytest.mark.slow
def test_the_whole_race_of_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    some = {method: EVERY[method] for method in ("dense", "updates:4")}  # the test above has them all
    monkeypatch.setattr("benchmarks.slow_network.gpt_race.EVERY", some)
    path = tmp_path / "gpt.json"
    words = ["gpt", "--quick", "--workers", "2", "--data", TEXT, "--out", str(path)]
    assert main([*words, "--parts", "search", "race", "steps"]) == 0
    said = capsys.readouterr()
    content = json.loads(path.read_text())
    num_rows = [len(content[kind]) for kind in ("search", "race", "steps", "latency")]
    assert num_rows == [2, 4, 4, 0]  # two seeds are raced
    assert said.out.startswith("| to a test loss of 3.6 |") and said.err.count("search:") == 2
    for row in content["race"]:
        assert (row["bandwidth_bits_per_s"] is None) == (
            row["method"] in ("dense", "fp16") or row["seed"] == 2
        )
    assert main([*words, "--parts", "search"]) == 0
    assert "search:" not in capsys.readouterr().err  # what was searched is not searched again


def test_latency_is_measured_in_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    race = GptRace(parser("").parse_args(["gpt", "--quick"]), "command")
    race.results.content["search"] = [{**race_row("updates:4", None, [3.0]), "lr": 0.5, "workers": 4}]
    launched: list[Any] = []
    monkeypatch.setattr(race, "_launch", lambda kind, runs, links: launched.append((kind, runs, links)))
    race.measure_latency("links")  # type: ignore[arg-type]
    ((kind, (run,), links),) = launched
    assert (kind, links, run["method"], run["lr"]) == ("latency", "links", "updates:4", 0.5)
    assert (run["stretch"], run["most_stretches"], run["bandwidth_bits_per_s"]) == (16, 2, 100e6)


def race_row(method: str, link: float | None, losses: list[float]) -> dict[str, Any]:
    curve = [[2.0 * number, loss] for number, loss in enumerate(losses, 1)]
    return {
        "method": method, "bandwidth_bits_per_s": link, "curve": curve, "stretch": 16, "lr": 0.001,
        "steps": 16 * len(curve), "sent_bytes": 1e6,
    }  # fmt: skip


def step_row(method: str, link: float, step_s: float) -> dict[str, Any]:
    return {"method": method, "bandwidth_bits_per_s": link, "step_s": step_s}


CONTENT: dict[str, Any] = {
    "plan": {
        "link": 100e6,
        "slow_link": 10e6,
        "losses": [3.0],
        "target": 2.0,
        "warm_up": 10,
        "num_steps": 64,
    },
    "race": [
        race_row("updates:2", 100e6, [3.5, 2.5, 1.9]),
        race_row("updates:2", None, [3.5, 1.9]),
        race_row("updates:2", None, [3.5, 2.5, 2.1, 1.9]),
        race_row("powersgd", 100e6, [2.9, 1.8]),
        race_row("diloco", 100e6, [3.9, 3.8]),
        race_row("dense", None, [3.0, 2.0]),
    ],
    "steps": [
        *(step_row(method, 100e6, 0.125) for method in ("updates:2", "powersgd", "diloco")),
        *(step_row(method, 10e6, 0.25) for method in ("updates:2", "powersgd", "diloco")),
        step_row("dense", 100e6, 2.5),
        step_row("dense", 10e6, 25.0),
    ],
    "latency": [{"latency_s": 0.05, "step_s": 1.05}, {"latency_s": 0.0, "step_s": 1.0}],
}


def test_seconds_to_a_loss() -> None:
    assert first_at(CONTENT["race"][0], 3.0) == (32, 4.0)
    assert first_at(CONTENT["race"][0], 1.0) is None
    assert computed_s("dense", 32, 10e6, CONTENT) == 800
    assert computed_s("powersgd", 32, 10e6, CONTENT) == 10 * 25 + 22 * 0.25  # its first steps are dense
    assert computed_s("fp16", 32, 10e6, CONTENT) is None


def test_tables() -> None:
    summary = summarise(CONTENT)
    assert summary["latency"]["ratio"] == 1.05
    ours = next(e for e in summary["to_losses"] if (e["method"], e["loss"]) == ("updates:2", 2.0))
    assert ours["seconds"] == {"100 Mbit/s": 6.0, "10 Mbit/s": 12.0}
    assert (ours["steps"], ours["steps_of_seeds"]) == (48, [48, 32, 64])
    assert ours["trained_on_link"] == {"steps": 48, "seconds": 6.0}
    assert next(e for e in summary["to_losses"] if e["method"] == "dense")["trained_on_link"] is None
    lines = tables({**CONTENT, "summary": summary}).splitlines()
    assert lines[2] == "| DDP, float32 | 0.001 | 32 (32) | 1,000 kB | 80 s | 1.0 x | 800 s | 1.0 x |"
    assert lines[4] == "| DiLoCo, dense, every 16 steps | 0.001 | not in 64 | 1,000 kB |  |  |  |  |"
    assert lines[5] == (
        "| ours, every 2 steps | 0.001 | 48 (48, 32, 64) | 1,000 kB | 6 s | 13.3 x | 12 s | 66.7 x |"
    )
    assert lines[8:10] == ["|---|---:|---:|", "| DDP, float32 | 40 s, 16 steps | 80 s, 32 steps |"]
    assert lines[-1].endswith("takes 1.050 times as long as without (1.05 s and 1 s).")


def test_entries_that_fill_the_bytes() -> None:
    numel, codes = 3_000_000, {"value_code": VALUE_CODE, "index_code": "elias-fano"}
    for every in (2, 4):
        k = num_entries(numel, every)
        sizes = [full_message_bytes(n, numel, dtype=torch.float32, **codes) for n in (k, k + 1)]
        assert sizes[0] <= BYTES_PER_PARAMETER * every * numel < sizes[1]


def test_another_plan_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "gpt.json"
    path.write_text(json.dumps({"plan": {}, "search": []}))
    options = parser("").parse_args(["gpt", "--out", str(path)])
    with pytest.raises(ArgumentError, match=r"out must hold results of the same plan, but .* has another"):
        GptRace(options, "command")


def test_the_lowest_loss_at_the_end_of_the_search_wins() -> None:
    race = GptRace(parser("").parse_args(["gpt"]), "command")
    tried = {0.001: [2.0, 2.9], 0.002: [3.0, 2.8], 0.004: [3.0, 3.1]}
    race.results.content["search"] = [
        {**race_row("dense", None, losses), "lr": lr, "workers": 4} for lr, losses in tried.items()
    ]
    assert race.best_lr("dense") == 0.002
    with pytest.raises(ArgumentError, match="learning rates must be searched first, there are none of fp16"):
        race.best_lr("fp16")
