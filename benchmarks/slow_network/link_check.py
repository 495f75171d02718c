"""What do the links carry while all ranks send at once, and how long does a trip take? Run by `launch`.

Known transfers over gloo: every rank sends to the next and receives from the last, as in a ring. The
bandwidth is that between a short and a long message, so latency is not in it.
"""

import time

import torch
import torch.distributed as dist

from benchmarks.slow_network.rank import Rank, joined
from benchmarks.slow_network.relay import wire_bytes

SHORT_S, LONG_S = 0.25, 1.0  # of the link
UNSHAPED_BITS_PER_S = 1e9  # by which messages are as long where links are not shaped
NUM_TRIES = 5  # of the smallest message: the shortest counts, however busy the machine is


def main() -> None:
    with joined() as rank:
        for bandwidth in rank.job["bandwidths_bits_per_s"]:
            rank.ask_for_links(bandwidth)
            found = checked(rank, bandwidth or UNSHAPED_BITS_PER_S)
            rank.ask_for_links(None)
            link = {"bandwidth_bits_per_s": bandwidth, "latency_s": rank.job["latency_s"]}
            rank.record({"workers": rank.num_workers, **link, **found})


def checked(rank: Rank, bandwidth: float) -> dict[str, float]:
    """The payload that a link carries per second, and the seconds of a message of one byte.

    With a relay, also the share of a core that it took while all sent, and how late it was at most.
    """
    short, long = (int(bandwidth * seconds / 8) for seconds in (SHORT_S, LONG_S))
    trip_s = min(ring_s(rank, 1) for _ in range(NUM_TRIES))
    short_s = ring_s(rank, short)
    before = rank.relay_state()
    long_s = ring_s(rank, long)
    found = {"achieved_bits_per_s": 8 * (long - short) / max(long_s - short_s, 1e-9), "trip_s": trip_s}
    found["off"] = found["achieved_bits_per_s"] * wire_bytes(long) / long / bandwidth - 1
    return found | relay_use(before, rank.relay_state(), long_s)


def relay_use(before: dict[str, float], after: dict[str, float], seconds: float) -> dict[str, float]:
    """The share of a core that the relay took in some seconds, and how late it was at most."""
    if not before:
        return {}
    return {"relay_busy": (after["busy_s"] - before["busy_s"]) / seconds, "relay_late_s": after["late_s"]}


def ring_s(rank: Rank, num_bytes: int) -> float:
    """How long the slowest rank takes to send so much to the next and to receive as much from the last."""
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    rank.gathered()
    start = time.perf_counter()
    sending = dist.isend(sent, (rank.index + 1) % rank.num_workers)
    receiving = dist.irecv(received, (rank.index - 1) % rank.num_workers)
    for work in (sending, receiving):
        assert work is not None
        work.wait()
    return rank.slowest(time.perf_counter() - start)
