"""What `plan` assumes of a link, and of the collectives that run on it; in words: docs/planning.md.

CPUs talk by gloo. A worker receives a message before it adds it up and passes it on, so the processor's time
and the link's time are added. GPUs talk by NCCL, of which nothing is measured: what is assumed stands here.
"""

from math import ceil, log2
from typing import NamedTuple

from regtopk.core.link import Link
from regtopk.core.traffic import goes_directly

WIRE_BYTES_PER_BYTE = (1448 + 66 + 66 / 2) / 1448  # TCP over Ethernet, in segments of 1448 bytes
BACKWARD = 2 / 3  # of a step's computation
TOLD_BYTES = 32  # a message's length and its number of entries, whether more follows, and a checksum
NCCL_HOP_S = 14e-6  # beside the latency: what NCCL's own tuner takes for a hop between machines (tuning.cc)


class Move(NamedTuple):
    """One collective on a worker's interface."""

    kind: str
    num_messages: int  # that a worker sends one after another
    num_hops: int  # one after another, until the last byte arrives
    sent_bytes: float  # through the interface, which receives as many at the same time
    is_told: bool = False  # whether only senders know how long a message is: see `transport.told`

    def on_link_s(self, link: Link, device: str) -> float:
        """How long it takes on a link, the work of processors left out."""
        bytes_s = 8 * WIRE_BYTES_PER_BYTE * self.sent_bytes / link.bandwidth
        if device != "cpu":  # NCCL: a ring to gather, short messages too, and trees to sum
            others = {"all_gather": self.num_messages, "all_to_all": self.num_hops}
            num_hops = others.get(self.kind, 2 * ceil(log2(1 + self.num_messages // 2))) + self.is_told
            return num_hops * (link.latency_s + NCCL_HOP_S) + bytes_s
        message_s = bytes_s / max(1, self.num_messages)
        # gloo's receiver tells the sender first that it is ready; beside long messages that takes no time
        hop_s = link.latency_s + max(0.0, link.latency_s - message_s / 4)
        if self.kind.startswith("all_reduce"):  # its ring has two halves of a message under way
            hop_s = max(0.0, hop_s - message_s / 2)
        is_told_before = self.is_told and self.num_hops > 1  # else lengths travel with what they are of
        return self.num_hops * hop_s + 2 * link.latency_s * is_told_before + bytes_s


def told(move: Move) -> Move:
    """The same, of messages whose lengths only their senders know."""
    return move._replace(sent_bytes=move.sent_bytes + TOLD_BYTES * move.num_messages, is_told=True)


def all_gather(message_bytes: float, num_workers: int) -> Move:
    """A ring: every message visits every worker. Short ones are sent to everybody at once."""
    others = num_workers - 1
    hops = min(1, others) if goes_directly(message_bytes, num_workers) else others
    return Move("all_gather", others, hops, others * message_bytes)


def all_reduce(vector_bytes: float, num_workers: int, kind: str = "all_reduce") -> Move:
    """A ring: the vector's parts go round once to be summed, and once more to reach everybody."""
    hops = 2 * (num_workers - 1)
    return Move(kind, hops, hops, hops * vector_bytes / num_workers)


def all_to_all(part_bytes: float, num_workers: int) -> Move:
    """Every worker to every other, all at once."""
    others = num_workers - 1
    return Move("all_to_all", others, min(1, others), others * part_bytes)


def hidden_s(travels_s: float, compute_s: float, num_parts: int, every: int, delay: int | None) -> float:
    """How much of the time that the messages of all parts travel hides behind computation.

    An exchange takes place every so many steps of `compute_s`, in so many parts. Each part may travel beside
    `delay` steps. Where that is None, all parts but the last travel beside backward.
    """
    if delay is None:
        return min(BACKWARD * compute_s, travels_s) * (num_parts - 1) / num_parts
    return min(min(num_parts * delay, every) * compute_s, travels_s)
