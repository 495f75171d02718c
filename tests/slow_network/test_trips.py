"""What latency costs an exchange: how many trips over the network its collectives take."""

import os

import pytest

from benchmarks.slow_network.__main__ import links_of
from benchmarks.slow_network.launch import launch
from tests.slow_network.network import needs_namespaces

LATENCY_S = 0.1
FEW = 3  # trips


@needs_namespaces
@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="the kernel has no TAP interfaces")
def test_short_vectors_reach_all_ranks_in_a_round_trip() -> None:
    """gloo's ring would take 3 trips to gather from 4 ranks and 6 to sum, and a trip to say it is ready."""
    with links_of(4, LATENCY_S) as links:
        (trips,) = launch("tests.slow_network.trips", {"latency_s": LATENCY_S, "few": FEW}, links)
    assert set(trips) == {"maximum", "all_gather"}
    for name, count in trips.items():
        assert 0.9 < count < FEW, (name, count)
