"""What latency costs an exchange: how many trips over the network its collectives take."""

from benchmarks.slow_network.launch import launch
from benchmarks.slow_network.links import links_of

LATENCY_S = 0.1
FEW = 3  # trips


def test_short_vectors_reach_all_ranks_in_a_round_trip() -> None:
    """gloo's ring would take 3 trips to gather from 4 ranks and 6 to sum, and a trip to say it is ready."""
    with links_of(4, LATENCY_S, "relay") as links:
        (trips,) = launch("tests.slow_network.trips", {"latency_s": LATENCY_S, "few": FEW}, links)
    assert set(trips) == {"maximum", "all_gather"}
    for name, count in trips.items():
        assert 0.9 < count < FEW, (name, count)
