"""What a delay hides: the table, and what counts as a peak."""

from typing import Any

from benchmarks.slow_network.delays import ALONE, BANDWIDTHS, METHODS, table
from benchmarks.slow_network.rank import busiest


def test_the_busiest_window() -> None:
    assert busiest([]) == 0
    counts = [(0.0, 0), (0.05, 10), (0.1, 20), (0.15, 120), (0.3, 130), (0.35, 130)]
    assert busiest(counts) == 110  # from 0.05 to 0.15
    assert busiest(counts, window_s=1.0) == 130


def test_the_table_compares_with_the_unshaped_link() -> None:
    times: dict[float | None, float] = {None: 0.2, BANDWIDTHS[0]: 0.25, BANDWIDTHS[1]: 0.4}
    content: dict[str, Any] = {
        "losses": [{"method": m, "curve": [[1.0, loss]]} for m in METHODS for loss in (2.0, 3.0)],
        "steps": [
            {"method": m, "bandwidth_bits_per_s": b, "step_s": s, "busiest_bytes": 12_340}
            for m in (ALONE, *METHODS)
            for b, s in times.items()
        ],
    }
    lines = table(content).splitlines()
    assert (
        lines[0] == "| method | step, ms | rate on 100 Mbit/s, 10 Mbit/s, 50 ms | loss | busiest 100 ms, kB |"
    )
    assert lines[2] == "| updates:4 | 200 | 0.800, 0.500 | 2.5000 | 12.3 |"
    assert lines[2 + len(METHODS) :] == ["", "A step without an exchange takes 200 ms."]
