"""Plans of exchanges of updates: what a local step takes, which rounds a link can afford, what to paste."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import regtopk
from regtopk.cli import app
from regtopk.core.link import Link
from regtopk.errors import ArgumentError
from regtopk.lab.plan.methods import DENSE, DILOCO, FP16, POWERSGD, Method, planned_methods, update_labels
from regtopk.lab.plan.page import as_code
from regtopk.lab.plan.predict import Prediction, Situation, make_plan, predict
from regtopk.lab.plan.workload import Workload
from regtopk.rounds import Rounds
from tests.lab.plan.made_up import calibration, write_calibration

ROOT = Path(__file__).parents[2]
COSTS = calibration()
COMPUTE_S = 0.3
HERE = Situation(Workload.of_size(10**7), 4, Link(1e8, 0.001, COMPUTE_S))
WORDS = ("--params", "10M", "--workers", "4", "--bandwidth", "100M", "--step-time", "300ms")


def method(name: str = "topk", every: int = 1, **options: Any) -> Method:
    turns = {name: options.pop(name) for name in ("outer", "delay", "fragments") if name in options}
    rounds = Rounds("updates", every, **turns)
    return Method(name, 0.01, "4bit", "all_gather", rounds)._replace(**options)


def plan(*words: str) -> Any:
    answer = CliRunner().invoke(app, ["plan", *WORDS, "--calibration", "costs.json", "--json", *words])
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_calibration(Path("costs.json"))


def predicted(planned: Method, here: Situation = HERE) -> Prediction:
    return predict(planned, here, COSTS)


def test_a_local_step_is_the_computation_and_its_share_of_a_round() -> None:
    once, twice, rarely = (predicted(method(every=n)) for n in (1, 2, 16))
    round_s = once.step_time_s - COMPUTE_S
    assert twice.step_time_s == pytest.approx(COMPUTE_S + round_s / 2)
    assert rarely.step_time_s == pytest.approx(COMPUTE_S + round_s / 16)
    assert (
        rarely.exchange.bytes_per_step
        == once.exchange.bytes_per_step / 16
        == once.exchange.payload_bytes / 16
    )


def test_latency_counts_once_a_round() -> None:
    far = Situation(HERE.workload, 4, Link(1e8, 0.101, COMPUTE_S))
    slower_s = [
        predicted(method(every=n), far).step_time_s - predicted(method(every=n)).step_time_s for n in (1, 4)
    ]
    assert slower_s == pytest.approx([0.1 * (1 + 3), 0.1 * (1 + 3) / 4])  # the agreement and an all_gather


def test_a_round_passes_over_the_model_as_an_update_exchange_does() -> None:
    assert {"updates none", "select topk", "decode 4bit"} < predicted(method()).exchange.lines
    assert not {"ddp", "exchange"} & predicted(method()).exchange.lines
    assert "updates nesterov" in predicted(method("dense", outer="nesterov")).exchange.lines


@pytest.mark.parametrize(
    ("name", "way", "more_bytes"),
    [("topk:impute=0.35", "all_gather", 0), ("topk:impute=learned", "all_gather", 36)],
)
def test_what_imputation_sends_beside(name: str, way: str, more_bytes: int) -> None:
    plain, imputed = (predicted(method(each, collective=way)).exchange for each in ("topk", name))
    assert imputed.payload_bytes - plain.payload_bytes == more_bytes
    assert "decode 4bit senders" in imputed.lines and f"select {name}" in imputed.lines


def test_a_split_sum_tells_in_a_byte_how_many_sent_an_entry() -> None:
    plain, imputed = (predicted(method(n, collective="split")).exchange for n in ("topk", "topk:impute=0.35"))
    union_of_a_region = 10**7 * (1 - 0.99**4) / 4
    more_bytes = imputed.moves[-1].sent_bytes - plain.moves[-1].sent_bytes
    assert more_bytes == pytest.approx(3 * union_of_a_region, rel=0.1)


def test_the_default_list() -> None:
    found = plan("--exchange", "updates")
    rows = found["methods"]
    ours = {(r["name"], r["every"]) for r in rows if r["exchange"] == "updates"}
    assert ours == {("dense", 16), *(("topk:impute=0.35", every) for every in (1, 2, 4, 8))}
    assert {r["fragments"] for r in rows if r["every"] == 4} == {1, 4}
    assert {(r["density"], r["value_code"]) for r in rows if r["every"] == 2} == {
        (density, "4bit") for density in (0.01, 0.025, 0.05)
    }
    advised = 'TopK(density=0.01, value_code="4bit", impute=0.35)'  # the README's first line
    assert advised in (ROOT / "README.md").read_text()
    notes = plan("--exchange", "updates", "--bandwidth", "10M", "--every", "2")["notes"]
    line = f"UpdateExchange(model, optimizer, regtopk.{advised}, every=2"
    assert any(line in note.replace("'", '"') for note in notes)
    assert [r["name"] for r in rows if r["exchange"] == "gradients"] == ["dense", "fp16", "powersgd"]
    diloco = next(r for r in rows if r["every"] == 16)
    assert diloco["value_code"] == "float32" and diloco["bytes_per_step"] == diloco["payload_bytes"] / 16
    assert found["inputs"]["exchange"] == "updates" and found["inputs"]["every"] is None


def test_every_and_words() -> None:
    rows = plan("--exchange", "updates", "--every", "8")["methods"]
    assert {r["every"] for r in rows if r["exchange"] == "updates"} == {8}
    word = "topk:value_code=4bit:impute=0.35:exchange=updates:every=2"
    rows = plan("--algorithms", f"{word},regtopk", "--density", "0.02")["methods"]
    found = {
        (r["name"], r["value_code"], r["density"], r["every"]) for r in rows if r["exchange"] == "updates"
    }
    assert found == {("topk:impute=0.35", "4bit", 0.02, 2)}
    assert {r["exchange"] for r in rows if r["name"] == "regtopk"} == {"gradients"}
    rows = plan("--exchange", "updates", "--algorithms", "regtopk:every=3,topk:density=0.5")["methods"]
    ours = {(r["name"], r["every"], r["density"]) for r in rows if r["exchange"] == "updates"}
    assert {row[:2] for row in ours} == {("regtopk", 3), ("topk", 1), ("topk", 2)}
    assert {row[2] for row in ours if row[0] == "topk"} == {0.5}


def test_a_delay_hides_the_link_and_no_work() -> None:
    """The link of 1 Mbit/s takes seconds, of which a delay hides what is computed meanwhile."""
    slow = replace(HERE, link=Link(1e6, 0.01, COMPUTE_S))
    now, later, much_later = (predicted(method(every=16, delay=n), slow).step_time_s for n in (0, 2, 15))
    assert now - later == pytest.approx(2 * COMPUTE_S / 16)
    assert COMPUTE_S < much_later < later
    fast = replace(HERE, link=Link(1e12, 0.0, COMPUTE_S))
    assert predicted(method(every=16, delay=15), fast).step_time_s == pytest.approx(
        predicted(method(every=16), fast).step_time_s, rel=1e-3
    )


def test_fragments_pay_the_latency_of_each() -> None:
    small = Workload.of_size(10**5)  # all messages are short enough to go to everybody at once
    far, near = (replace(HERE, workload=small, link=Link(1e12, s, COMPUTE_S)) for s in (0.1, 0.0))
    whole, parts = (predicted(method(every=4, fragments=n), far) for n in (1, 4))
    waits = [p.step_time_s - predicted(p.method, near).step_time_s for p in (whole, parts)]
    assert waits[1] == pytest.approx(4 * waits[0])
    assert parts.exchange.payload_bytes == pytest.approx(whole.exchange.payload_bytes, rel=0.1)


def test_delay_and_fragments_as_options_and_as_words() -> None:
    found = plan("--exchange", "updates", "--delay", "2", "--fragments", "3")
    ours = {(r["every"], r["delay"], r["fragments"]) for r in found["methods"] if "topk" in r["name"]}
    assert (
        ours == {(3, 2, 3), (4, 2, 3), (8, 2, 3)}
        and found["inputs"]["delay"] == 2
        and found["inputs"]["fragments"] == 3
    )
    assert "every=3, delay=2, fragments=3" in as_code(method(every=3, delay=2, fragments=3))
    for words, message in (
        (["--delay", "1"], "--delay needs --exchange updates, got --delay 1"),
        (["--exchange", "updates", "--every", "2", "--delay", "2"], "delay must be an integer from 0 to 1"),
        (["--exchange", "updates", "--every", "0"], "every must be an integer"),
    ):
        answer = CliRunner().invoke(app, ["plan", *WORDS, "--calibration", "costs.json", *words])
        assert answer.exit_code == 2 and message in " ".join(answer.output.split())


def test_the_rounds_that_a_link_can_afford_are_named() -> None:
    methods = planned_methods((0.01,), labels=[DILOCO.format(16), *update_labels(["topk"], None)])
    found = make_plan(HERE, COSTS, methods, 1e15).affordable_rounds()
    rounds = {p.method.kind: (p, every) for p, every in found}
    assert rounds.keys() == {"DiLoCo", "topk updates"}
    assert rounds["DiLoCo"][1] is None  # 80 MB at 100 Mbit/s
    cheapest, every = rounds["topk updates"]
    assert every is not None and every > 1
    enough, too_few = (
        predicted(cheapest.method._replace(rounds=Rounds("updates", n))).step_time_s
        for n in (every, every // 2)
    )
    assert enough <= 1.1 * COMPUTE_S < too_few
    notes = plan("--exchange", "updates", "--algorithms", "topk", "--density", "0.01")["notes"]
    assert any(f"costs at most 10% of the computation from --every {every} on" in note for note in notes)
    notes = plan("--exchange", "updates")["notes"]
    assert any("DiLoCo" in note and "even with --every 64" in note for note in notes)


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        (method(every=4), regtopk.TopK(density=0.01, value_code="4bit")),
        (method("topk:impute=learned"), regtopk.TopK(density=0.01, value_code="4bit", impute="learned")),
        (method("dense", 16, value_code="float32", density=1.0, outer="nesterov"), regtopk.Dense()),
    ],
)
def test_the_line_to_paste(planned: Method, expected: Any) -> None:
    (statement,) = ast.parse(as_code(planned)).body
    assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
    call = statement.value
    assert ast.unparse(call.func) == "regtopk.UpdateExchange"
    assert [ast.unparse(word) for word in call.args[:2]] == ["model", "optimizer"]
    assert eval(ast.unparse(call.args[2])) == expected
    options = {word.arg: ast.unparse(word.value) for word in call.keywords}
    assert options["every"] == str(planned.rounds.every)
    outer = "lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)"
    assert options.get("outer") == (outer if planned.rounds.outer == "nesterov" else None)
    assert options.get("collective") == ("'all_gather'" if planned.name != "dense" else None)


def test_the_line_for_gradients() -> None:
    line = as_code(Method("regtopk", 0.001, "float32", "split"))
    algorithm = "regtopk.RegTopK(density=0.001)"
    assert line == f"exchange = regtopk.attach(model, {algorithm}, collective='split')"


def test_an_older_calibration_plans_no_updates_and_says_so() -> None:
    write_calibration(Path("costs.json"), "updates none", "updates nesterov")
    found = plan("--exchange", "updates")
    assert {row["exchange"] for row in found["methods"]} == {"gradients"}
    (note,) = [text for text in found["notes"] if text.startswith("Left out, since")]
    assert "DiLoCo, every 16, topk:impute=0.35 updates, every 1" in note


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--exchange", "weights"], "exchange must be one of gradients, updates, got 'weights'"),
        (["--every", "2"], "--every needs --exchange updates, got --every 2"),
        (["--exchange", "updates", "--every", "0"], "every must be an integer of at least 1, got 0"),
        (["--algorithms", "topk", "--all"], "give --algorithms or --all, got both"),
        (["--algorithms", "topk:residual_dtype=bfloat16"], "a planned method has no residual_dtype"),
        (["--algorithms", "topk:k=3"], "a planned method has a density, not k, and the index code"),
        (["--algorithms", "topk:index_code=rice"], "got 'topk:index_code=rice'"),
        (["--algorithms", "global-topk"], "algorithms must be such as a cluster can run, got 'global-topk'"),
        (["--algorithms", "topq"], "algorithm must be one of "),
    ],
)
def test_bad_input(words: list[str], message: str) -> None:
    answer = CliRunner().invoke(app, ["plan", *WORDS, "--calibration", "costs.json", *words])
    assert answer.exit_code == 2 and message in answer.stderr


def test_all_algorithms_can_be_planned_on_updates() -> None:
    names = {row["name"] for row in plan("--exchange", "updates", "--all", "--every", "4")["methods"]}
    assert names >= {"dense", "topk", "regtopk", "consensus", "sketch"} and "global-topk" not in names


def test_torchs_own_methods_have_no_line_of_ours() -> None:
    assert all(not m.rounds.has_updates for m in (DENSE, FP16, POWERSGD))
    found = plan("--bandwidth", "400G")
    assert found["best"]["name"] == "dense" and not any("regtopk." in note for note in found["notes"])


def test_a_bad_word_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ArgumentError, match="every must stand with exchange=updates"):
        planned_methods(labels=["topk:every=2"])
