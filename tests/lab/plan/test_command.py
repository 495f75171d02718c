import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from regtopk.cli import app
from regtopk.lab.plan.calibrate import cache_path
from tests.lab.plan.made_up import calibration

LINK = ("--workers", "4", "--bandwidth", "100 Mbps", "--latency", "50us", "--step-time", "50ms")
SMALL = ("--params", "11173962", *LINK, "--calibration", "costs.json")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, with a calibration in it."""
    monkeypatch.chdir(tmp_path)
    calibration().write(Path("costs.json"))


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
        "exchange": "gradients",
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
    assert next(row for row in found["methods"] if row["name"] == "dense")["speedup"] == 1


def test_a_fast_link_does_not_pay() -> None:
    found = plan(*SMALL, "--bandwidth", "400 Gbit/s")
    assert found["pays"] is False and found["best"]["name"] == "dense"
    assert not any("regtopk." in note for note in found["notes"])  # nothing of ours to paste
    code, out, _ = invoke(*SMALL, "--bandwidth", "400 Gbit/s")
    assert code == 0 and "Compression does not pay with 4 workers at 400 Gbit/s: dense is fastest" in out


def test_a_table_what_is_assumed_and_then_the_answer() -> None:
    code, out, err = invoke(*SMALL)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith(" ")]
    names = [row[0] for row in rows if row]
    assert names[0] == "density" and names[3] == "dense"
    assert names.count("regtopk") == names.count("dense") == 1
    answer = "Compression pays with 4 workers at 100 Mbit/s: "
    assert (
        0 < out.index("Assumed: latency 50 µs") < out.index(answer) < out.index("it pays, above it does not.")
    )


def test_a_claim_for_every_bandwidth_says_what_it_rests_on() -> None:
    calibration({"move all_reduce": {"bytes": 1e-6}, "move all_reduce half": {"bytes": 1e-6}}).write(
        Path("costs.json")
    )
    out = invoke(*SMALL)[1]
    assert "It would pay at every bandwidth, if dense's all_reduce takes gloo's work." in out


def test_a_page(tmp_path: Path) -> None:
    code, out, _ = invoke(*SMALL, "--out", tmp_path / "page")
    assert code == 0 and str(tmp_path / "page" / "index.html") in out
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "4 workers, links of any bandwidth" in page and "100 Mbit/s, any number of workers" in page
    assert "<p class=finding>Compression pays with 4 workers at 100 Mbit/s: " in page  # in bold
    assert page.index("<th>speed-up</th>") < page.index("<th>density</th>")  # in sight on a phone
    config = json.loads((tmp_path / "page" / "config.json").read_text())
    marks = [(panel["mark"], panel["mark_label"]) for panel in config["panels"]]
    assert marks == [(100.0, "100 Mbit/s"), (4, "4 workers")]
    assert config["command"].startswith("regtopk plan --params 11173962 --workers 4 --bandwidth '100 Mbps' ")
    records = [json.loads(x) for x in (tmp_path / "page" / "metrics.jsonl").read_text().splitlines()]
    assert max(r["num_workers"] for r in records if r["against"] == "workers") == 4096
    rows = {row["measure"] for row in json.loads((tmp_path / "page" / "summary.json").read_text())["table"]}
    assert {r["method"] for r in records} == rows  # the legend says what the table says
    assert {r["mbit_per_s"] for r in records if r["against"] == "bandwidth" and "here" in r} == {100.0}
    code, _, err = invoke(*SMALL, "--out", tmp_path / "page")
    assert code == 2 and "--force" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bandwidth fast", "bandwidth must be"),
        ("--latency 10Mbps", "latency must be"),
        ("--step-time 0ms", "step time must be"),
        ("--params many", "params must be"),
        ("--workers 1", "workers must be an integer of at least 2, got 1"),
        ("--workers 1000001", "workers must be at most 1,000,000, got 1,000,001"),
        ("--density 0.1,2", "density must be numbers in (0, 1], separated by commas, got '0.1,2'"),
        ("--device abacus", "device must be one of cpu"),
        ("--calibration /nowhere.json", "calibration must be readable"),
        ("--exchange weights", "exchange must be one of gradients, updates, got 'weights'"),
        ("--every 2", "--every needs --exchange updates, got --every 2"),
        ("--exchange updates --every 0", "every must be an integer of at least 1, got 0"),
        ("--algorithms topk:k=3", "a planned method has a density, and no k, index_code or residual_dtype"),
        ("--algorithms topk:index_code=raw32", "got 'topk:index_code=raw32'"),
        ("--algorithms topk:residual_dtype=bfloat16", "got 'topk:residual_dtype=bfloat16'"),
        ("--algorithms topk:value_code=int8", "value_code of a planned method must be one of float32, 4bit"),
        ("--algorithms sketch", "a planned algorithm must be one of topk, regtopk, consensus, dgc, dense"),
        ("--algorithms topq", "algorithm must be one of "),
        ("--algorithms topk:every=2", "every must stand with exchange=updates"),
        ("--algorithms=", "algorithm must be one of "),
        ("--algorithms= --exchange updates", "algorithm must be one of "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words: str, message: str) -> None:
    code, out, err = invoke(*SMALL, *words.split(" "))
    assert (code, out) == (2, "")
    assert err.startswith("regtopk: ") and message in err and err.count("\n") == 1


def test_a_kept_calibration_is_used_and_another_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured: list[str] = []

    def calibrate(device: str, progress: Any) -> Any:
        measured.append(device)
        return calibration()

    monkeypatch.setattr(sys.modules["regtopk.cli.plan"], "calibrate", calibrate)
    code, out, err = invoke("--params", "1M", *LINK)
    assert code == 0 and "fp16" in out and "measuring what work costs on this machine" in err
    assert invoke("--params", "1M", *LINK, "--exchange", "updates")[::2] == (0, "")
    assert measured == ["cpu"] and cache_path("cpu").exists()
    assert invoke("--params", "1M", *LINK, "--recalibrate")[0] == 0 and measured == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"machine": ', "calibration must be what `regtopk plan` writes, but costs.json is not"),
        ('{"machine": {"device": "cpu"}, "lines": {}}', "calibration must hold the costs of 'ddp'"),
    ],
)
def test_a_torn_calibration_says_how_to_go_on(text: str, message: str) -> None:
    Path("costs.json").write_text(text)
    code, _, err = invoke(*SMALL)
    assert code == 2 and message in err and "--recalibrate measures this machine" in err
