"""A new algorithm in the table is planned without a word about it in plan."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from regtopk.algorithms import ALGORITHMS
from regtopk.cli import app
from regtopk.core.algorithm import Conversation, Promise, Sparsifier
from regtopk.core.codes import segment_bytes
from regtopk.core.requests import DenseSum
from regtopk.core.selection import take_at_
from regtopk.core.sparse import to_dense
from regtopk.core.state import ResidualState
from regtopk.core.worker import Worker
from regtopk.lab.plan.asked import probe
from regtopk.lab.plan.bench import Bench
from regtopk.lab.plan.cases import algorithm_points
from tests.lab.plan.made_up import write_calibration

NAME = "round-robin"
WORDS = ("plan", "--all", "--json", "--params", "1024", "--workers", "2", "--density", "0.5")
LINK = ("--bandwidth", "1M", "--step-time", "1ms", "--calibration", "costs.json")


@dataclass(frozen=True, kw_only=True)
class RoundRobin(Sparsifier[ResidualState]):
    """Send the entries in turn: the algorithm of docs/add-an-algorithm.md."""

    name: ClassVar[str] = NAME
    promises: ClassVar[frozenset[Promise]] = frozenset({"conserves", "exact_k", "shared_support"})

    def init(self, worker: Worker) -> ResidualState:
        return ResidualState(residual=worker.zeros())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        k = self.num_selected(worker)
        turn = worker.step * k + torch.arange(k, device=grad.device)
        indices = (turn % worker.numel).sort().values
        values = take_at_(state.residual, grad, indices, code=self.value_code)
        total = yield DenseSum(values, worker.weight, self.value_code)
        return to_dense(indices.expand(total.shape), total, worker.numel)


class Chatty(RoundRobin):
    """Asks once more for every worker."""

    name: ClassVar[str] = "chatty"

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        for _ in range(worker.num_workers):
            yield DenseSum(grad[..., :8], worker.weight)
        return (yield from super().exchange(grad, state, worker))


@pytest.fixture(autouse=True)
def in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, NAME, RoundRobin)
    monkeypatch.chdir(tmp_path)


def test_it_is_planned() -> None:
    write_calibration(Path("costs.json"))
    answer = CliRunner().invoke(app, [*WORDS, *LINK])
    assert answer.exit_code == 0, answer.output
    rows = {row["value_code"]: row for row in json.loads(answer.stdout)["methods"] if row["name"] == NAME}
    assert set(rows) == {"float32", "4bit", "2bit"}
    part = segment_bytes(256, dtype=torch.float32, value_code="4bit")  # a half of the 512, for one of two
    assert rows["4bit"]["payload_bytes"] == 2 * part and rows["4bit"]["collective"] == "split"


def test_more_workers_may_ask_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "chatty", Chatty)
    asked = probe("chatty", 0.5, "4bit").requests
    assert len(asked) == 4 + 1 and all(each.per_k == 1 and each.per_k_over_n == 0 for each in asked)


def test_its_work_can_be_measured() -> None:
    work, seconds = next(algorithm_points(Bench(torch.device("cpu")), NAME))
    assert work.line == f"select {NAME}" and work.units["entries"] == 1024 and seconds > 0
