"""Plans of exchanges of updates: what a local step takes, which rounds are planned, what to paste."""

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
from regtopk.lab.plan.methods import PlannedMethod
from regtopk.lab.plan.page import as_code
from regtopk.lab.plan.predict import Prediction, Situation, predict
from regtopk.lab.plan.workload import Workload
from regtopk.rounds import Rounds
from tests.lab.plan.made_up import calibration

COSTS = calibration()
COMPUTE_S = 0.3
HERE = Situation(Workload.of_size(10**7), 4, Link(1e8, 0.001, COMPUTE_S))
WORDS = ("--params", "10M", "--workers", "4", "--bandwidth", "100M", "--step-time", "300ms")


def method(name: str = "topk", every: int = 1, **options: Any) -> PlannedMethod:
    turns = {name: options.pop(name) for name in ("outer", "delay", "fragments") if name in options}
    return PlannedMethod(name, 0.01, "4bit", Rounds("updates", every, **turns))._replace(**options)


@pytest.fixture
def plan(tmp_path: Path) -> Any:
    """What `regtopk plan` prints as JSON."""
    COSTS.write(tmp_path / "costs.json")
    words = ["plan", *WORDS, "--exchange", "updates", "--calibration", str(tmp_path / "costs.json"), "--json"]

    def invoke(*more: str) -> Any:
        answer = CliRunner().invoke(app, [*words, *more])
        assert answer.exit_code == 0, answer.output
        return json.loads(answer.stdout)

    return invoke


def predicted(planned: PlannedMethod, here: Situation = HERE) -> Prediction:
    return predict(planned, here, COSTS)


def test_a_local_step_is_the_computation_and_its_share_of_a_round() -> None:
    once, twice, rarely = (predicted(method(every=n)) for n in (1, 2, 16))
    round_s = once.step_time_s - COMPUTE_S
    assert twice.step_time_s == pytest.approx(COMPUTE_S + round_s / 2)
    assert rarely.step_time_s == pytest.approx(COMPUTE_S + round_s / 16)
    payload_bytes = once.exchange.payload_bytes
    assert rarely.exchange.bytes_per_step == once.exchange.bytes_per_step / 16 == payload_bytes / 16


def test_latency_counts_once_a_round() -> None:
    far = replace(HERE, link=Link(1e8, 0.101, COMPUTE_S))
    slower_s = [
        predicted(method(every=n), far).step_time_s - predicted(method(every=n)).step_time_s for n in (1, 4)
    ]
    assert slower_s == pytest.approx([0.1 * (1 + 3), 0.1 * (1 + 3) / 4])  # the agreement and an all_gather


def test_a_round_passes_over_the_model() -> None:
    def passes(planned: PlannedMethod) -> int:
        return [work.line for work in predicted(planned).exchange.work].count("pass")

    gradients = PlannedMethod("topk", 0.01, "4bit")
    assert [passes(each) for each in (gradients, method(), method(outer="nesterov"))] == [2, 3, 6]


def test_imputation_sends_nothing_and_finds_out_who_sent() -> None:
    plain, imputed = (predicted(method(name)).exchange for name in ("topk", "topk:impute=0.35"))
    assert imputed.payload_bytes == plain.payload_bytes
    assert {"select 4bit senders", "sparse 4bit senders"} < {work.line for work in imputed.work}


def test_a_split_sum_tells_in_a_byte_how_many_sent_an_entry() -> None:
    many = replace(HERE, num_workers=64)
    denser = [method(name, density=0.25, value_code="float32") for name in ("topk", "topk:impute=0.35")]
    plain, imputed = (predicted(each, many).exchange for each in denser)
    assert plain.collective == imputed.collective == "split"
    union_of_a_region = 10**7 / 64
    more_bytes = imputed.moves[-1].sent_bytes - plain.moves[-1].sent_bytes
    assert more_bytes == pytest.approx(63 * union_of_a_region, rel=0.1)


def test_the_default_list(plan: Any) -> None:
    found = plan()
    rows = found["methods"]
    ours = {(r["name"], r["every"]) for r in rows if r["exchange"] == "updates"}
    assert ours == {("dense", 16), *(("topk:impute=0.35", every) for every in (1, 2, 4, 8))}
    assert {r["fragments"] for r in rows if r["every"] == 4} == {1, 4}
    densities = {(r["density"], r["value_code"]) for r in rows if r["every"] == 2}
    assert densities == {(density, "4bit") for density in (0.01, 0.025, 0.05)}
    assert [r["name"] for r in rows if r["exchange"] == "gradients"] == ["dense", "fp16", "powersgd"]
    diloco = next(r for r in rows if r["every"] == 16)
    assert diloco["value_code"] == "float32" and diloco["bytes_per_step"] == diloco["payload_bytes"] / 16
    notes = plan("--bandwidth", "10M", "--every", "2")["notes"]
    line = (
        "UpdateExchange(model, optimizer, regtopk.TopK(density=0.01, value_code='4bit', impute=0.35), every=2"
    )
    assert any(line in note for note in notes)


def test_every_and_words(plan: Any) -> None:
    rows = plan("--every", "8")["methods"]
    assert {r["every"] for r in rows if r["exchange"] == "updates"} == {8}
    words = (
        "topk:value_code=4bit:exchange=updates:every=4:delay=1:fragments=2,regtopk:every=3,topk:density=0.5"
    )
    rows = [r for r in plan("--algorithms", words, "--density", "0.02")["methods"] if r["every"] > 1]
    keys = ("name", "value_code", "density", "every", "delay", "fragments")
    assert {tuple(r[key] for key in keys) for r in rows if r["value_code"] == "4bit"} == {
        ("topk", "4bit", 0.02, 4, 1, 2),
        ("regtopk", "4bit", 0.02, 3, 0, 1),
        ("topk", "4bit", 0.5, 2, 0, 1),
    }


def test_a_delay_hides_the_link_and_no_work() -> None:
    """The link of 1 Mbit/s takes seconds, of which a delay hides what is computed meanwhile."""
    slow = replace(HERE, link=Link(1e6, 0.01, COMPUTE_S))
    now, later, much_later = (predicted(method(every=16, delay=n), slow).step_time_s for n in (0, 2, 15))
    assert now - later == pytest.approx(2 * COMPUTE_S / 16)
    assert COMPUTE_S < much_later < later
    fast = replace(HERE, link=Link(1e12, 0.0, COMPUTE_S))
    waited_s, hidden_s = (predicted(method(every=16, delay=n), fast).step_time_s for n in (0, 15))
    assert hidden_s == pytest.approx(waited_s, rel=1e-3)


def test_fragments_pay_the_latency_of_each() -> None:
    small = Workload.of_size(10**5)  # all messages are short enough to go to everybody at once
    far, near = (replace(HERE, workload=small, link=Link(1e12, s, COMPUTE_S)) for s in (0.1, 0.0))
    whole, parts = (predicted(method(every=4, fragments=n), far) for n in (1, 4))
    waits = [p.step_time_s - predicted(p.method, near).step_time_s for p in (whole, parts)]
    assert waits[1] == pytest.approx(4 * waits[0])
    assert parts.exchange.payload_bytes == pytest.approx(whole.exchange.payload_bytes, rel=0.1)


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        (method(every=4, delay=1, fragments=2), regtopk.TopK(density=0.01, value_code="4bit")),
        (method("topk:impute=0.35"), regtopk.TopK(density=0.01, value_code="4bit", impute=0.35)),
        (method("dense", 16, value_code="float32", density=1.0, outer="nesterov"), regtopk.Dense()),
    ],
)
def test_the_line_to_paste(planned: PlannedMethod, expected: Any) -> None:
    (statement,) = ast.parse(as_code(planned)).body
    assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
    call = statement.value
    assert ast.unparse(call.func) == "regtopk.UpdateExchange"
    assert [ast.unparse(word) for word in call.args[:2]] == ["model", "optimizer"]
    assert eval(ast.unparse(call.args[2])) == expected
    options = {word.arg: ast.unparse(word.value) for word in call.keywords}
    outer = options.pop("outer", None)
    assert options == {name: str(value) for name, value in planned.turns.items()}
    nesterov = "lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)"
    assert outer == (nesterov if planned.rounds.outer == "nesterov" else None)


def test_the_line_for_gradients() -> None:
    line = as_code(PlannedMethod("regtopk", 0.001, "float32"))
    assert line == "exchange = regtopk.attach(model, regtopk.RegTopK(density=0.001))"
