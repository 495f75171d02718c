"""Training through two routers that hide their machines, over a link that stalls."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.slow_network.namespaces import NetworkError
from benchmarks.slow_network.nat import homes, train


def test_a_tunnel_changes_no_bit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(homes())
        except NetworkError as error:
            pytest.skip(str(error))
        found = train(made, tmp_path, stall_s=3.0)
    assert found["has_loopback_bits"] and found["num_starts"] == 1
    assert found["stalled_after_step"] < found["last_step"]
