"""How many trips over links with latency a collective of ours takes. One rank's side; run by `launch`."""

import time
from collections.abc import Callable
from math import inf
from typing import Any

import torch

from benchmarks.slow_network.rank import Rank, joined
from regtopk.distributed.transport.collectives import Collectives, group_or_default

NUM_TIMES = 40


def main() -> None:
    with joined() as rank:
        collectives = Collectives(group_or_default(None))
        numbers, message = torch.zeros(3, dtype=torch.int64), torch.zeros(1000, dtype=torch.uint8)
        maximum = least_trips(rank, lambda: collectives.maximum(numbers))
        rank.record(
            {"maximum": maximum, "all_gather": least_trips(rank, lambda: collectives.all_gather(message))}
        )


def least_trips(rank: Rank, collective: Callable[[], Any]) -> float:
    """The least of many tries, on the slowest rank: what latency makes of it, however busy the machine is."""
    shortest_s = trips = inf
    for _ in range(NUM_TIMES):
        rank.gathered()
        start = time.perf_counter()
        collective()
        shortest_s = min(shortest_s, time.perf_counter() - start)
        trips = rank.slowest(shortest_s) / float(rank.job["latency_s"])
        if trips < rank.job["few"]:
            break
    return trips
