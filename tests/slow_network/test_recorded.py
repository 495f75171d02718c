"""What the recorded measurement shows; the file itself is checked, nothing is timed here."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.slow_network.methods import ACCURACY_METHODS, STEP_METHODS, Method
from benchmarks.slow_network.results import with_headers

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "slow-network.json"
CONTENT: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = CONTENT["steps"]
RACES = [row for row in CONTENT["time_to_accuracy"] if row["bandwidth_bits_per_s"] is not None]
LINKS = [10e6, 100e6, 1e9, None]
SMALL_FRAMES_BYTES = 500  # a collective and worker, beside the messages: gloo announces each
BUCKETS = 3
NUM_COLLECTIVES = {
    "dense": BUCKETS,
    "fp16": BUCKETS,
    "powersgd": 3,
    "peer-topk": 2 * BUCKETS,
    "topk": 2,  # an agreement, and the messages
    "regtopk": 2,
    "dgc": 2,
}


def step_of(method: str, bandwidth: float | None, workers: int = 4) -> dict[str, Any]:
    wanted = vars(Method.parse(method)) | {"workers": workers, "bandwidth_bits_per_s": bandwidth}
    wanted["method"] = wanted.pop("name")
    found = [row for row in STEPS if row.items() >= wanted.items() and row["latency_s"] == 0]
    assert len(found) == 1, (method, bandwidth, workers)
    return found[0]


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("bandwidth", LINKS)
def test_every_method_is_there(workers: int, bandwidth: float | None) -> None:
    for method in STEP_METHODS:
        row = step_of(method, bandwidth, workers)
        assert row["params"] == 11_173_962
        assert min(row["step_s_all"]) <= row["step_s"] <= max(row["step_s_all"])
        assert len(row["step_s_all"]) >= (3 if bandwidth != 10e6 else 1)
        assert 0 < row["compute_s"] < row["step_s"]


def test_against_dense_and_fp16_at_100_mbit() -> None:
    sparse = step_of("regtopk:0.001", 100e6)["step_s"]
    assert step_of("dense", 100e6)["step_s"] >= 20 * sparse
    assert step_of("fp16", 100e6)["step_s"] >= 8 * sparse


@pytest.mark.parametrize("method", ["regtopk:0.001", "regtopk:0.001:4bit"])
def test_the_link_costs_little_more_than_its_bytes(method: str) -> None:
    """At most twice sent_bytes / bandwidth and 5 ms a round: the agreement, and the messages."""
    shaped, unshaped = step_of(method, 100e6), step_of(method, None)
    assert shaped["step_s"] - unshaped["step_s"] <= 2 * 8 * shaped["sent_bytes"] / 100e6 + 2 * 5e-3


@pytest.mark.parametrize("row", STEPS, ids=lambda row: f"{row['method']}-{row['bandwidth_bits_per_s']}")
def test_the_kernel_counts_what_we_say(row: dict[str, Any]) -> None:
    """Within 5 %, headers of full frames, acknowledgements and announcements added."""
    num_collectives = NUM_COLLECTIVES[row["method"]] + 3 * (row["collective"] == "split")
    small_frames = SMALL_FRAMES_BYTES * row["workers"] * num_collectives
    for way, other in (("sent", "received"), ("received", "sent")):
        said, counted = row[f"{way}_bytes"], row[f"interface_{way}_bytes"]
        assert said <= counted <= 1.05 * with_headers(said, row[f"{other}_bytes"]) + small_frames


def test_time_to_accuracy_at_100_mbit() -> None:
    assert len({row["target"] for row in RACES}) == 1
    assert {row["bandwidth_bits_per_s"] for row in RACES} == {100e6}
    reached = {(row["method"], row["value_code"]): row["reached_s"] for row in RACES}
    for code in ("float32", "4bit"):
        assert reached["dense", None] >= 5 * reached["regtopk", code]


def test_all_methods_tried_the_same_learning_rates() -> None:
    tried: dict[tuple[str, str | None], set[float]] = defaultdict(set)
    for row in CONTENT["time_to_accuracy"]:
        tried[row["method"], row["value_code"]].add(row["lr"])
    methods = [Method.parse(text) for text in ACCURACY_METHODS]
    assert tried == {(method.name, method.value_code): {0.1, 0.2, 0.4, 0.8} for method in methods}
