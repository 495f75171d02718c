import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from regtopk.cli import app
from regtopk.lab.plan.calibrate import Machine
from regtopk.lab.plan.costs import Calibration
from tests.lab.plan.made_up import calibration, write_calibration

LINK = ("--workers", "4", "--bandwidth", "100 Mbps", "--latency", "50us", "--step-time", "50ms")
SMALL = ("--params", "11173962", *LINK, "--calibration", "costs.json")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, with a calibration in it."""
    monkeypatch.chdir(tmp_path)
    write_calibration(Path("costs.json"))


def invoke(*words: str | Path) -> tuple[int, str, str]:
    answer = CliRunner().invoke(app, ["plan", *map(str, words)])
    return answer.exit_code, answer.stdout, answer.stderr


def plan(*words: str | Path) -> Any:
    code, out, err = invoke(*words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_json() -> None:
    found = plan(*SMALL)
    assert list(found) == ["inputs", "methods", "best", "break_even_bits_per_s", "pays", "notes"]
    expected = {
        "params": 11_173_962,
        "workers": 4,
        "bandwidth_bits_per_s": 1e8,
        "latency_s": 50e-6,
        "step_time_s": 0.05,
    }
    assert {name: found["inputs"][name] for name in expected} == expected
    keys = ["name", "density", "value_code", "collective", "exchange", "every", "delay"]
    keys += ["fragments", "payload_bytes", "bytes_per_step", "step_time_s", "speedup"]
    keys += ["is_recorded", "relative_steps", "speedup_to_loss"]
    assert all(list(row) == keys for row in [*found["methods"], found["best"]])
    assert found["pays"] is True and found["best"] in found["methods"] and found["best"]["speedup"] > 15
    assert 1e8 < found["break_even_bits_per_s"] < 1e11
    names = {row["name"] for row in found["methods"]}
    assert names == {"dense", "fp16", "powersgd", "topk", "regtopk", "consensus", "dgc"}
    assert {row["collective"] for row in found["methods"]} == {"all_reduce", "all_gather", "split"}
    dense = next(row for row in found["methods"] if row["name"] == "dense")
    assert dense["speedup"] == 1


def test_a_fast_link_does_not_pay() -> None:
    found = plan(*SMALL, "--bandwidth", "400 Gbit/s")
    assert found["pays"] is False and found["best"]["name"] == "dense"
    code, out, _ = invoke(*SMALL, "--bandwidth", "400 Gbit/s")
    assert code == 0 and "Compression does not pay with 4 workers at 400 Gbit/s: dense is fastest" in out


def test_a_table_and_the_answer() -> None:
    code, out, err = invoke(*SMALL)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith(" ")]
    names = [row[0] for row in rows if row]
    assert (
        names[0] == "density" and names[3] == "dense" and names.count("regtopk") == names.count("dense") == 1
    )
    assert "rank 2" in out
    assert "Compression pays with 4 workers at 100 Mbit/s: " in out and "it pays, above it does not." in out
    assert "A faster step is not a better one" in out


def test_densities() -> None:
    found = plan(*SMALL, "--density", "0.5,0.02")
    assert {row["density"] for row in found["methods"]} == {1.0, 0.5, 0.02}


def test_a_page(tmp_path: Path) -> None:
    code, out, _ = invoke(*SMALL, "--out", tmp_path / "page")
    assert code == 0 and str(tmp_path / "page" / "index.html") in out
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "4 workers, links of any bandwidth" in page and "100 Mbit/s, any number of workers" in page
    assert "<p class=finding>Compression pays with 4 workers at 100 Mbit/s: " in page  # in bold
    assert page.index("<th>speed-up</th>") < page.index("<th>density</th>")  # in sight on a phone
    config = json.loads((tmp_path / "page" / "config.json").read_text())
    assert [(panel["mark"], panel["mark_label"]) for panel in config["panels"]] == [
        (100.0, "100 Mbit/s"),
        (4, "4 workers"),
    ]
    assert config["command"].startswith("regtopk plan --bandwidth '100 Mbps' --workers 4 --params 11173962 ")
    records = [json.loads(x) for x in (tmp_path / "page" / "metrics.jsonl").read_text().splitlines()]
    assert max(r["num_workers"] for r in records if r["against"] == "workers") == 4096
    rows = {row["measure"] for row in json.loads((tmp_path / "page" / "summary.json").read_text())["table"]}
    assert {r["method"] for r in records} == rows  # the legend says what the table says
    assert {r["mbit_per_s"] for r in records if r["against"] == "bandwidth" and "here" in r} == {100.0}
    code, _, err = invoke(*SMALL, "--out", tmp_path / "page")
    assert code == 2 and "--force" in err


def test_messages_that_do_not_fit_the_memory_are_named() -> None:
    found = plan(*SMALL, "--workers", "4096", "--memory", "1GB")
    (note,) = [text for text in found["notes"] if text.startswith("Left out: ")]
    assert "the messages of 4096 workers do not fit 1 GB of memory" in note
    ways = {(row["name"], row["density"], row["collective"]) for row in found["methods"]}
    assert ("topk", 0.1, "all_gather") not in ways and ("dense", 1.0, "all_reduce") in ways


MODULE = "from torch import nn\n\ndef network():\n    return nn.Linear(30, 20)\n"


def test_a_model_measured_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan_zoo.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    words = "--model plan_zoo:network --workers 2 --bandwidth 1.5G --calibration costs.json"
    model = words.split()
    found = plan(*model, "--measure", "--input-shape", "8,30")
    assert found["inputs"]["params"] == 620 and found["inputs"]["step_time_s"] > 0
    assert plan(*model, "--step-time", "1ms")["inputs"]["params"] == 620
    code, _, err = invoke(*model, "--measure")
    assert code == 2 and "--measure needs the model's inputs: --input-shape" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--bandwidth", "fast"], "bandwidth must be a number above 0 with a unit such as"),
        (["--bandwidth", "-1G"], "bandwidth must be"),
        (["--bandwidth", "100 MB"], "bandwidth must be"),
        (["--latency", "10 Mbps"], "latency must be a time of at least 0 such as"),
        (["--step-time", "0ms"], "step time must be a time above 0 such as"),
        (["--params", "many"], "params must be a whole number of at least 1"),
        (["--workers", "1"], "workers must be an integer of at least 2, got 1"),
        (["--workers", "1000001"], "workers must be at most 1,000,000, got 1,000,001"),
        (["--density", "0.1,2"], "density must be numbers in (0, 1], separated by commas, got '0.1,2'"),
        (["--memory", "big"], "memory must be a size above 0"),
        (["--local-workers", "0"], "local_workers must be an integer of at least 1, got 0"),
        (["--model", "os:getcwd"], "give --params or --model, got both"),
        (["--measure"], "give --step-time, or --model with --measure, got both"),
        (["--calibration", "/nowhere.json"], "calibration must be readable"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: list[str], message: str) -> None:
    code, out, err = invoke(*SMALL, *words)
    assert (code, out) == (2, "")
    assert err.startswith("regtopk: ") and message in err and err.count("\n") == 1


def test_a_model_that_fails_to_import_shows_its_own_error() -> None:
    code, _, err = invoke("--model", "no_such_zoo:network", *LINK)
    assert code == 2 and "failed with ModuleNotFoundError: No module named 'no_such_zoo'" in err


def test_measuring_needs_a_model() -> None:
    words = ["--params", "1M", "--workers", "2", "--bandwidth", "1G", "--measure"]
    code, _, err = invoke(*words)
    assert code == 2 and "--measure needs --model, got --params" in err


def test_a_kept_calibration_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration().write(Machine().path)
    code, out, err = invoke("--params", "1M", *LINK)
    assert (code, err) == (0, "") and "fp16" in out


def test_what_the_cache_lacks_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_calibration(Machine().path, "exchange", "quantise 4bit", "move all_gather")
    code, out, err = invoke("--params", "1M", *LINK)
    assert code == 0 and "fp16" in out and "measuring what work costs on this machine" in err
    assert Calibration.read(Machine().path).lines.keys() == calibration().lines.keys()


def test_what_a_given_calibration_lacks_is_left_out_with_a_note() -> None:
    write_calibration(Path("costs.json"), "select dgc")
    found = plan(*SMALL)
    assert "dgc" not in {row["name"] for row in found["methods"]}
    assert "Left out, since this calibration has not measured all of their work: dgc." in found["notes"]
    assert found["notes"][-1] in invoke(*SMALL)[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"machine": ', "calibration must be what `regtopk plan` writes, but costs.json is not"),
        ('{"machine": {}, "lines": {}}', "calibration must hold the costs of 'ddp'"),
    ],
)
def test_a_torn_calibration_says_how_to_go_on(text: str, message: str) -> None:
    Path("costs.json").write_text(text)
    code, _, err = invoke(*SMALL)
    assert code == 2 and message in err and "--recalibrate measures this machine" in err


def test_what_is_missing_is_named() -> None:
    link = ["--workers", "2", "--bandwidth", "1G"]
    assert "give --step-time, or --model with --measure, got neither" in invoke("--params", "1M", *link)[2]
    assert "give --params or --model, got neither" in invoke("--step-time", "1ms", *link)[2]
    words = ["--model", "os:getcwd", "--measure", "--local-workers", "2", *link]
    assert "--measure times a worker that has this machine to itself" in invoke(*words)[2]
