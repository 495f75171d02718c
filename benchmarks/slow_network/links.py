"""Links of a given bandwidth and latency between the workers.

Both ends of a link are shaped by a token bucket (tc tbf): what a worker sends at its own end, what it
receives at the switch's. The bucket is small, a quarter of a millisecond of the link but at least 4 kB (a few
frames), so that short messages do not ride for free; the queue is long enough that nothing is dropped. Delay
is netem's. Where the kernel has none of that, bytes pass a relay (relayed.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.slow_network.namespaces import (
    INTERFACE,
    Namespaces,
    NetworkError,
    check_possible,
    command,
)
from benchmarks.slow_network.relayed import RelayedLinks

BURST_S = 0.25e-3
SMALLEST_BURST_BYTES = 4096
QUEUE_BYTES = 4_000_000
SHAPERS = ("auto", "tc", "relay")


class KernelLinks:
    """The links of all workers, each in a network namespace of its own; every link is alike.

    Args:
        num_workers: how many.
        latency_s: of all links, for as long as they are there; the bandwidth may change.
    """

    shaper = "tc"

    def __init__(self, num_workers: int, latency_s: float = 0.0) -> None:
        self.namespaces = Namespaces(num_workers)
        self.num_workers, self.latency_s = num_workers, latency_s
        self.bandwidth_bits_per_s: float | None = None

    def add(self) -> None:
        """Lay the links, unshaped."""
        self.namespaces.add()
        self.namespaces.add_veth()
        self.namespaces.connect()
        self.shape(None)

    def remove(self) -> None:
        """Remove the links and the namespaces; works half-way too."""
        self.namespaces.remove()

    def surroundings(self, rank: int) -> dict[str, str]:
        """The environment of a rank."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE}

    def namespace(self, rank: int) -> str:
        """Where a rank lives."""
        return self.namespaces.workers[rank]

    def shape(self, bandwidth_bits_per_s: float | None) -> None:
        """Change the bandwidth of all links."""
        if self._is_shaped():
            for namespace, interface, _ in self._ends():
                command("tc", "-n", namespace, "qdisc", "del", "dev", interface, "root")
        self.bandwidth_bits_per_s = bandwidth_bits_per_s
        for namespace, interface, is_port in self._ends():
            root = ("tc", "-n", namespace, "qdisc", "add", "dev", interface)
            parent: tuple[str, ...] = ("root",)
            if bandwidth_bits_per_s is not None:
                command(*root, *parent, "handle", "1:", *token_bucket(bandwidth_bits_per_s))
                parent = ("parent", "1:1")
            if self.latency_s > 0 and is_port:
                command(*root, *parent, "netem", "delay", f"{self.latency_s * 1e6:.0f}us", "limit", "10000")

    def _is_shaped(self) -> bool:
        return self.bandwidth_bits_per_s is not None

    def _ends(self) -> list[tuple[str, str, bool]]:
        """Namespace and interface of both ends of every link, and whether it is the switch's."""
        own = [(worker, INTERFACE, False) for worker in self.namespaces.workers]
        switch = [(self.namespaces.switch, f"port{rank}", True) for rank in range(len(own))]
        return own + switch


Links = KernelLinks | RelayedLinks


@contextmanager
def links_of(num_workers: int, latency_s: float = 0.0, shaper: str = "auto") -> Iterator[Links]:
    """Links that are removed whatever happens; "auto": the kernel's where it can shape them."""
    if shaper == "auto":
        shaper = "tc" if why_no_kernel_links(latency_s) is None else "relay"
    if shaper == "tc":
        check_possible()
    links: Links = (KernelLinks if shaper == "tc" else RelayedLinks)(num_workers, latency_s)
    try:
        links.add()
        yield links
    finally:
        links.remove()


def why_no_kernel_links(latency_s: float) -> str | None:
    """What this machine lacks for links in namespaces; None if nothing."""
    try:
        with links_of(2, latency_s, "tc") as links:
            links.shape(100e6)
    except NetworkError as error:
        return str(error)
    return None


def token_bucket(bandwidth_bits_per_s: float) -> list[str]:
    """tc's words for a bandwidth."""
    burst_bytes = max(SMALLEST_BURST_BYTES, int(bandwidth_bits_per_s / 8 * BURST_S))
    words = f"tbf rate {bandwidth_bits_per_s:.0f}bit burst {burst_bytes} limit {QUEUE_BYTES}"
    return words.split()
