import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from regtopk import Link, recipes
from regtopk.cli import app
from regtopk.lab.plan.costs import cache_path
from regtopk.lab.plan.methods import ADVISED
from regtopk.lab.plan.page import UNKNOWN
from tests.lab.plan.made_up import calibration

FASTER = "Predicted to be faster still: "
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
    assert list(found) == ["basis", "inputs", "methods", "best", "break_even_bits_per_s", "pays", "notes"]
    link = {"workers": 4, "bandwidth_bits_per_s": 1e8, "latency_s": 50e-6, "step_time_s": 0.05}
    expected = {"params": 11_173_962, **link, "exchange": "gradients"}
    assert expected.items() <= found["inputs"].items()
    keys = "name density value_code collective exchange every delay fragments payload_bytes bytes_per_step "
    keys += "sent_bytes_per_step received_bytes_per_step float32_ring_over_received "
    keys += "bfloat16_ring_over_received step_time_s speedup is_recorded relative_steps speedup_to_loss"
    assert all(list(row) == keys.split() for row in [*found["methods"], found["best"]])
    assert found["pays"] is True and found["best"] in found["methods"] and found["best"]["speedup"] > 15
    assert 1e8 < found["break_even_bits_per_s"] < 1e11
    names = {row["name"] for row in found["methods"]}
    assert names == {"dense", "fp16", "powersgd", "topk", "regtopk", "consensus", "dgc"}
    dense = next(row for row in found["methods"] if row["name"] == "dense")
    assert dense["speedup"] == 1 == round(dense["float32_ring_over_received"], 6)
    assert dense["received_bytes_per_step"] == pytest.approx(1.5 * 4 * 11_173_962)
    for row in found["methods"]:
        received = row["received_bytes_per_step"]
        assert row["bfloat16_ring_over_received"] == pytest.approx(1.5 * 2 * 11_173_962 / received)


def test_the_default_list_of_updates() -> None:
    rows = plan(*SMALL, "--exchange", "updates")["methods"]
    ours = {(r["name"], r["every"]) for r in rows if r["exchange"] == "updates"}
    assert ours == {
        ("dense", 16),
        ("topk:returned=0.01", 4),
        *(("topk:impute=0.35", every) for every in (1, 2, 4, 8)),
    }
    assert {r["fragments"] for r in rows if r["every"] == 4} == {1, 4}
    densities = {(r["density"], r["value_code"]) for r in rows if r["every"] == 2}
    assert densities == {(density, "4bit") for density in (0.0008, 0.01, 0.025, 0.05)}
    assert [r["name"] for r in rows if r["exchange"] == "gradients"] == ["dense", "fp16", "powersgd"]
    diloco = next(r for r in rows if r["every"] == 16)
    assert diloco["value_code"] == "float32" and diloco["bytes_per_step"] == diloco["payload_bytes"] / 16
    notes = plan(*SMALL, "--bandwidth", "10M", "--exchange", "updates", "--every", "2")["notes"]
    assert notes[0].startswith("Paste, on every rank: exchange = regtopk.UpdateExchange(")


def test_what_comes_back_in_part_is_as_long_for_any_number_of_workers() -> None:
    received: dict[tuple[str, int], float] = {}
    for workers in (8, 512):
        rows = plan(*SMALL, "--params", "124M", "--workers", f"{workers}", "--exchange", "updates")["methods"]
        of_four = [r for r in rows if (r["every"], r["fragments"], r["density"]) == (4, 4, 0.01)]
        received |= {(r["name"], workers): r["received_bytes_per_step"] for r in of_four}
    assert received["topk:returned=0.01", 512] < 1.3 * received["topk:returned=0.01", 8]
    assert received["topk:impute=0.35", 512] > 30 * received["topk:impute=0.35", 8]


@pytest.mark.parametrize("workers", [8, 16, 32, 64])
def test_with_muon_the_recipes_are_planned_by_their_records(workers: int) -> None:
    found = plan(*SMALL, "--params", "124M", "--workers", f"{workers}", "--optimizer", "muon")
    assert found["inputs"]["optimizer"] == "muon" and found["inputs"]["exchange"] == "updates"
    rows = [r for r in found["methods"] if r["exchange"] == "updates"]
    for recipe, row in zip(recipes.for_workers(workers), rows, strict=True):
        assert row["density"] == getattr(recipe.algorithm, "density", 1.0)
        assert (row["every"], row["fragments"]) == (recipe.every, recipe.fragments)
        assert row["received_bytes_per_step"] == pytest.approx(
            recipe.received_bytes(124_000_000, workers),
            rel=0.03,  # agreements and sizes beside messages
        )
        assert row["relative_steps"] == pytest.approx(recipe.steps, abs=0.005)
    assert rows[0]["relative_steps"] == min(row["relative_steps"] for row in rows) > 1


def test_a_density_that_would_change_nothing_is_refused() -> None:
    code, _, err = invoke(*SMALL, "--optimizer", "muon", "--density", "0.01")
    assert code == 2 and "density must stand in --algorithms with Muon, got [0.01]" in err


def test_what_has_no_record_is_not_best_where_something_has() -> None:
    words = "--params 124M --workers 8 --bandwidth 100Mbit/s --step-time 300ms --device cuda --every 2"
    found = plan(*words.split(), "--optimizer", "muon")  # PowerSGD would have the fastest step
    assert found["best"]["is_recorded"] and "powersgd" not in found["notes"][0]


def test_gradients_are_not_advised_with_adamw_and_muon() -> None:
    words = (
        "--params 124M --workers 8 --bandwidth 1Gbit/s --step-time 300ms --device cuda --exchange gradients"
    )
    told = "Sparse gradients learn slowly with AdamW and Muon: exchange updates instead."
    for optimizer, best in (("adamw", "powersgd"), ("muon", "fp16")):
        found = plan(*words.split(), "--optimizer", optimizer)
        assert found["best"]["name"] == best and told in found["notes"]


def test_no_hook_is_advised_where_compression_gains_little() -> None:
    words = "--params 124M --workers 8 --step-time 300ms --device cuda --optimizer muon --bandwidth"
    for gbit_per_s, best in ((10, "topk:returned=0.3:index_code=rice"), (17, "fp16")):
        assert plan(*words.split(), f"{gbit_per_s}Gbit/s")["best"]["name"] == best


def test_with_muon_the_sizes_that_ran_are_told() -> None:
    words = "--params 124M --bandwidth 100Mbit/s --step-time 300ms --device cuda --optimizer muon"
    signs = "Measure yours: a GPT of 124 M parameters took 1.8 times dense Muon's steps, and ended behind."
    muloco = "Measure yours: it ran with 4.8 M alone."
    many = "With 9 workers or more MuLoCo in 2 bits has not run: measure it, too."
    for workers, latency, told in ((8, "20ms", [muloco]), (9, "0", [signs]), (9, "20ms", [signs, many])):
        notes = plan(*words.split(), "--workers", f"{workers}", "--latency", latency)["notes"]
        assert notes[1 : 1 + len(told)] == told and many not in notes[1 + len(told) :]


def test_over_a_link_with_latency_whole_rounds_are_advised_with_muon() -> None:
    words = "--params 124M --workers 8 --bandwidth 100Mbit/s --step-time 100ms --optimizer muon --device cuda"
    for latency_ms, said in ((0.1, "regtopk.TopK(density=0.24"), (20, "regtopk.Dense(")):
        found = plan(*words.split(), "--latency", f"{latency_ms}ms")
        assert f"[muon, adamw], {said}" in found["notes"][0]
        link = Link(bandwidth=1e8, latency_s=latency_ms / 1000)
        recipe = recipes.transformer(8, numel=124_000_000, step_s=0.1, link=link)
        assert recipe.algorithm.value_code == found["best"]["value_code"]
        assert recipe.options.items() >= {k: found["best"][k] for k in ("every", "fragments")}.items()
    assert "sum_code='2bit'), every=16, outer=lambda p: " in found["notes"][0]


def test_updates_in_words() -> None:
    rows = plan(*SMALL, "--exchange", "updates", "--every", "8")["methods"]
    assert {r["every"] for r in rows if r["exchange"] == "updates"} == {8}
    words = "topk:value_code=4bit:exchange=updates:every=4:delay=1:fragments=2,regtopk:every=3"
    rows = plan(*SMALL, "--exchange", "updates", "--algorithms", words, "--density", "0.02")["methods"]
    keys = ("name", "value_code", "density", "every", "delay", "fragments")
    assert {tuple(r[key] for key in keys) for r in rows if r["value_code"] == "4bit" and r["every"] > 1} == {
        ("topk", "4bit", 0.02, 4, 1, 2),
        ("regtopk", "4bit", 0.02, 3, 0, 1),
    }


def test_a_link_that_does_not_pay_and_one_that_is_too_fast_to_predict() -> None:
    for bandwidth, said in (
        ("20 Gbit/s", "does not pay for SGD with 4 workers at 20 Gbit/s: "),
        ("400 Gbit/s", UNKNOWN),
    ):
        found = plan(*SMALL, "--bandwidth", bandwidth)
        assert found["pays"] is False and found["best"]["name"] in ("dense", "fp16")
        assert not any("Paste" in note for note in found["notes"])
        out = invoke(*SMALL, "--bandwidth", bandwidth)[1]
        assert said in out and "use no hook" in out


def test_what_is_advised_is_best_unless_others_are_asked_for() -> None:
    for words, name, density, faster in (
        ("1M", "consensus", 0.01, ["topk"]),  # level with regtopk, in three digits
        ("0.2M", "consensus", 0.01, ["regtopk"]),  # in 9.39 s, before dgc's 12.8 s
        ("1M --algorithms topk", "topk", 0.001, []),
    ):
        found = plan(*SMALL, "--bandwidth", *words.split())
        assert (found["best"]["name"], found["best"]["density"]) == (name, density), words
        assert [note.split()[5] for note in found["notes"] if note.startswith(FASTER)] == faster, words
    for latency, fragments in (("1ms", 2), ("30ms", 1)):
        updates = (*SMALL, "--params", "2M", "--latency", latency, "--exchange", "updates")
        best = plan(*updates)["best"]
        assert (best["name"], best["every"], best["fragments"]) == ("topk:impute=0.35", 2, fragments), latency
    assert plan(*updates, "--every", "500")["best"]["fragments"] == 1
    assert "Compression may pay for AdamW with 4 workers" in invoke(*updates, "--every", "500")[1]


def test_what_is_faster_still_is_a_row_of_the_table() -> None:
    """The advised way of a method stands for it, though another is faster where 4 bits take long."""
    slow = {"dense 4bit": {"calls": 0.2}, "powersgd": {"numel": 1e-6}}
    calibration(slow).write(Path("costs.json"))
    found = plan(*SMALL, "--algorithms", "consensus", "--density", "0.01")
    ways = {r["value_code"]: r["step_time_s"] for r in found["methods"] if r["name"] == "consensus"}
    assert found["best"]["value_code"] == "4bit" and ways["float32"] < 0.9 * ways["4bit"]
    assert not any(FASTER in note for note in found["notes"])


def test_dgc_is_said_to_be_measured_against_dense_without_momentum() -> None:
    for words, is_best in (("dgc", True), ("topk", False), (f"{ADVISED['sgd'][0]},dgc", True)):
        notes = plan(*SMALL, "--bandwidth", "10M", "--algorithms", words)["notes"]
        assert any("against dense SGD without" in note for note in notes) is is_best


def test_a_table_then_the_answer_and_what_it_rests_on() -> None:
    code, out, err = invoke(*SMALL)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith(" ")]
    names = [row[0] for row in rows if row]
    assert out.startswith("Planned for CPUs (the costs in costs.json). Work has costs measured on cpu with ")
    assert names[0] == "plan" and names[2] == "dense"
    assert names.count("regtopk") == names.count("dense") == 1
    said = ["Compression pays for SGD with 4 workers", "it pays, above it does not."]
    said += ["Paste, on every rank: ", "Assumed: latency 50 µs", "How sure: ", "Use none of it "]
    places = [out.index(each) for each in said]
    assert places[0] > 0 and places == sorted(places)


@pytest.mark.parametrize(
    ("params", "words", "said"),
    [
        ("350M", "", "Planned for GPUs (more than 100M parameters; --device cpu plans for CPUs). "),
        ("1M", "--device cuda", "Planned for GPUs (as asked). "),
    ],
)
def test_without_a_gpu_large_models_have_the_recorded_costs_of_one(
    params: str, words: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = invoke("--params", params, *LINK, *words.split())
    told = f"{said}Work has costs recorded on another machine's NVIDIA "
    assert (code, err) == (0, "") and out.startswith(told)
    assert ". Assumed, not measured: NCCL's collectives" in out.splitlines()[0]
    assert "Assumed: latency 50 µs one way; 50 ms for a step without communication; NCCL's " in out
    found = plan("--params", params, *LINK, *words.split(), "--bandwidth", "400 Gbit/s")
    assert found["pays"] is False and found["best"]["name"] == "dense"
    code, _, err = invoke("--params", params, *LINK, "--device", "cuda", "--recalibrate")
    refused = "regtopk: device must be cpu where torch finds no GPU, got 'cuda'"
    assert (code, err.splitlines()[-1]) == (2, refused)


def test_no_claim_is_made_for_links_that_are_not_predicted() -> None:
    slow = {f"move {kind}": {"bytes": 1e-6} for kind in ("all_reduce", "all_reduce half")}
    calibration(slow).write(Path("costs.json"))
    assert f"Below 25 Gbit/s it pays. {UNKNOWN}" in invoke(*SMALL)[1]


def test_a_page(tmp_path: Path) -> None:
    code, out, _ = invoke(*SMALL, "--out", tmp_path / "page")
    assert code == 0 and str(tmp_path / "page" / "index.html") in out
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    assert "4 workers, links of any bandwidth" in page and "100 Mbit/s, by the number of workers" in page
    assert "<p class=finding>Compression pays for SGD with 4 workers at 100 Mbit/s: " in page  # in bold
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


@pytest.mark.parametrize(("workers", "least", "most"), [("8", 2, 8), ("16", 2, 16), ("64", 32, 4096)])
def test_curves_by_workers_end_where_other_recipes_begin(
    tmp_path: Path, workers: str, least: int, most: int
) -> None:
    invoke(*SMALL, "--optimizer", "muon", "--workers", workers, "--out", tmp_path / "page")
    records = [json.loads(x) for x in (tmp_path / "page" / "metrics.jsonl").read_text().splitlines()]
    drawn = {r["num_workers"] for r in records if r["against"] == "workers"}
    assert (min(drawn), max(drawn)) == (least, most)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bandwidth fast", "bandwidth must be"),
        ("--step-time 0ms", "step time must be"),
        ("--workers 1", "workers must be an integer of at least 2, got 1"),
        ("--workers 1000001", "workers must be at most 1000000, got 1000001"),
        ("--density 0.1,2", "density must be numbers in (0, 1], separated by commas, got '0.1,2'"),
        ("--device abacus", "device must be one of cpu, cuda, got 'abacus'"),
        ("--exchange weights", "exchange must be one of gradients, updates, got 'weights'"),
        ("--every 2", "every must be given with exchange 'updates' alone, got 2"),
        ("--exchange updates --every 0", "every must be a whole number from 1 to 1e+15, "),
        ("--exchange updates --every 3G", "every must be at most 2147483647, got 3000000000"),
        ("--workers ８", "workers must be a whole number from 1 to 1e+15, "),
        ("--algorithms ,", "algorithm must be one of "),
        ("--algorithms topk:k=3", "a planned method has a density and no k or residual_dtype"),
        ("--algorithms topk:value_code=int8", "value_code of a planned method must be one of float32, 4bit"),
        ("--algorithms sketch", "a planned algorithm must be one of topk, regtopk, consensus, dgc, dense"),
        ("--algorithms topq", "algorithm must be one of "),
        ("--algorithms topk:every=2", "every must stand with exchange=updates"),
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
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    measured: list[str] = []

    def calibrate(device: str, progress: Any) -> Any:
        measured.append(device)
        return calibration()

    monkeypatch.setattr(sys.modules["regtopk.cli.plan"], "calibrate", calibrate)
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 99.0, 99.0), raising=False)
    code, out, err = invoke("--params", "1M", *LINK)
    assert code == 0 and "fp16" in out and "measuring what work costs on this machine" in err
    assert "the machine is busy (load 99.0), costs are too high: --recalibrate" in err
    again = invoke("--params", "1M", *LINK)[1].splitlines()[0]
    assert again.endswith("collectives are gloo's. Busy when they were measured (load 99.0): --recalibrate.")
    assert invoke("--params", "1M", *LINK, "--exchange", "updates")[::2] == (0, "")
    assert out.startswith("Planned for CPUs (no GPU here, and at most 100M parameters; --device cuda plans ")
    assert measured == ["cpu"] and cache_path("cpu").exists()
    assert invoke("--params", "1M", *LINK, "--recalibrate")[0] == 0 and measured == ["cpu", "cpu"]


@pytest.mark.parametrize("text", ['{"machine": ', '{"machine": {"device": "cpu"}, "lines": {}}'])
def test_a_torn_calibration_says_how_to_go_on(text: str) -> None:
    Path("costs.json").write_text(text)
    code, _, err = invoke(*SMALL)
    assert code == 2 and "calibration must" in err and "--recalibrate measures this machine" in err
