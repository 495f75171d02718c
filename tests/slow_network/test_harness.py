"""The whole harness, short: two ranks in two namespaces, 100 Mbit/s, a small model."""

import json
from pathlib import Path

from benchmarks.slow_network.__main__ import main
from benchmarks.slow_network.results import with_headers
from tests.slow_network.test_namespaces import needs_namespaces


@needs_namespaces
def test_two_ranks_on_a_slow_link(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    words = "steps --workers 2 --shaper tc --links 100Mbit --model small --most-steps 3 --seconds 0.5"
    assert main([*words.split(), "--methods", "dense", "regtopk:0.1", "--out", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["command"].startswith("python -m benchmarks.slow_network steps")
    assert content["time_to_accuracy"] == []
    dense, sparse = content["steps"]
    for row in (dense, sparse):
        assert (row["workers"], row["bandwidth_bits_per_s"], row["params"]) == (2, 1e8, 244_410)
        assert 1 <= len(row["step_s_all"]) <= 3 and min(row["step_s_all"]) > 0  # fewer if disturbed
        for way, other in (("sent", "received"), ("received", "sent")):
            moved = row[f"interface_{way}_bytes"]
            expected = with_headers(row[f"{way}_bytes"], row[f"{other}_bytes"])
            assert 0.95 * row[f"{way}_bytes"] < moved < 1.05 * expected
    assert dense["method"] == "dense" and dense["sent_bytes"] == 4 * 244_410
    assert (sparse["method"], sparse["density"], sparse["value_code"]) == ("regtopk", 0.1, "float32")
    assert dense["step_s"] > 8 * dense["sent_bytes"] / 1e8  # the link cannot be faster than it is
