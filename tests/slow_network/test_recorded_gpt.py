"""What the recorded race of the GPT shows; the file itself is checked, nothing is timed here."""

import json
from pathlib import Path
from typing import Any

from benchmarks.slow_network.gpt_methods import BYTES_PER_PARAMETER, EVERY
from benchmarks.slow_network.gpt_tables import summarise, tables

FOLDER = Path(__file__).parents[2] / "benchmarks"
CONTENT: dict[str, Any] = json.loads(
    (FOLDER / "results" / "slow-network-gpt.json").read_text(encoding="utf-8")
)
TARGET = {e["method"]: e for e in CONTENT["summary"]["to_losses"] if e["loss"] == CONTENT["plan"]["target"]}


def test_the_summary_is_that_of_the_rows() -> None:
    assert CONTENT["summary"] == json.loads(json.dumps(summarise(CONTENT)))
    readme = (FOLDER / "slow_network" / "README.md").read_text(encoding="utf-8")
    assert all(line in readme for line in tables(CONTENT).splitlines())


def test_ours_reaches_the_target_ten_times_sooner_than_dense() -> None:
    assert set(TARGET) == set(EVERY)
    for link, times in (("100 Mbit/s", 10), ("10 Mbit/s", 50)):
        for method in ("updates:2", "updates:4"):
            assert TARGET["dense"]["seconds"][link] >= times * TARGET[method]["seconds"][link]


def test_all_methods_tried_the_same_learning_rates_on_another_seed() -> None:
    tried = {(row["method"], row["lr"]) for row in CONTENT["search"]}
    assert tried == {(method, lr) for method in EVERY for lr in CONTENT["plan"]["lrs"]}
    assert {row["seed"] for row in CONTENT["search"]}.isdisjoint({row["seed"] for row in CONTENT["race"]})


def test_ours_keeps_to_its_bytes() -> None:
    for row in CONTENT["race"]:
        if row["method"].startswith("updates"):
            assert row["sent_bytes"] <= (row["workers"] - 1) * BYTES_PER_PARAMETER * row["params"]


def test_latency_costs_less_than_a_tenth() -> None:
    assert CONTENT["summary"]["latency"]["ratio"] <= 1.1
