"""How many trips over links with latency a collective of ours takes. One rank's side; run by `launch`."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.slow_network.rank import joined
from regtopk.distributed.collectives import Collectives, group_or_default

NUM_TIMES = 5


def main() -> None:
    with joined() as rank:
        collectives = Collectives(group_or_default(None))
        numbers, message = torch.zeros(3, dtype=torch.int64), torch.zeros(1000, dtype=torch.uint8)
        latency_s = rank.job["latency_s"]
        shortest = {
            "maximum": shortest_s(lambda: collectives.maximum(numbers)),
            "all_gather": shortest_s(lambda: collectives.all_gather(message)),
        }
        rank.record({name: rank.slowest(seconds) / latency_s for name, seconds in shortest.items()})


def shortest_s(collective: Callable[[], Any]) -> float:
    """The shortest of a few times: what the latency makes of it, not a busy machine."""
    times = []
    for _ in range(NUM_TIMES):
        dist.barrier()
        start = time.perf_counter()
        collective()
        times.append(time.perf_counter() - start)
    return min(times)
