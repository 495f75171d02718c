"""The race of the GPT, short: the training does not depend on the link."""

import pydoc_data.topics
from dataclasses import asdict
from typing import Any

import pytest
import torch

from benchmarks.slow_network.__main__ import links_of
from benchmarks.slow_network.gpt_methods import BYTES_PER_PARAMETER, EVERY, VALUE_CODE, num_entries
from benchmarks.slow_network.gpt_plan import QUICK
from benchmarks.slow_network.gpt_race import GptRace
from benchmarks.slow_network.gpt_tables import computed_s, first_at
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


def race_row(method: str, losses: list[float], **more: Any) -> dict[str, Any]:
    curve = [[2.0 * number, loss] for number, loss in enumerate(losses, 1)]
    link = {"workers": 4, "bandwidth_bits_per_s": None}
    return {"method": method, "curve": curve, "stretch": 16, **link, **more}


def test_seconds_to_a_loss() -> None:
    steps = [
        {"method": method, "bandwidth_bits_per_s": 10e6, "step_s": step_s}
        for method, step_s in (("dense", 25.0), ("powersgd", 0.25))
    ]
    content = {"plan": {"warm_up": 10}, "steps": steps}
    row = race_row("updates:2", [3.5, 2.5, 1.9])
    assert first_at(row, 3.0) == (32, 4.0) and first_at(row, 1.0) is None
    assert computed_s("dense", 32, 10e6, content) == 800
    assert computed_s("powersgd", 32, 10e6, content) == 10 * 25 + 22 * 0.25  # its first steps are dense
    assert computed_s("fp16", 32, 10e6, content) is None


def test_entries_that_fill_the_bytes() -> None:
    numel, codes = 3_000_000, {"value_code": VALUE_CODE, "index_code": "elias-fano"}
    for every in (2, 4):
        k = num_entries(numel, every)
        sizes = [full_message_bytes(n, numel, dtype=torch.float32, **codes) for n in (k, k + 1)]
        assert sizes[0] <= BYTES_PER_PARAMETER * every * numel < sizes[1]


def test_the_lowest_loss_at_the_end_of_the_search_wins() -> None:
    race = GptRace(parser("").parse_args(["gpt"]), "command")
    tried = {0.001: [2.0, 2.9], 0.002: [3.0, 2.8], 0.004: [3.0, 3.1]}
    race.results.content["search"] = [race_row("dense", losses, lr=lr) for lr, losses in tried.items()]
    assert race.best_lr("dense") == 0.002
    with pytest.raises(ArgumentError, match="learning rates must be searched first, there are none of fp16"):
        race.best_lr("fp16")
