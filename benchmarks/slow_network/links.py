"""Links of a given bandwidth and delay between the workers and the switch.

Both ends of a link are shaped by a token bucket (tc tbf): what a worker sends at its own end, what it
receives at the switch's. The bucket is small, a quarter of a millisecond of the link but at least 4 kB (a few
frames), so that short messages do not ride for free; the queue is long enough that nothing is dropped. Delay
is the kernel's (netem) where it has that, else frames take a way through a relay (relay.py).
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.slow_network.namespaces import INTERFACE, Namespaces, NetworkError, command

BURST_S = 0.25e-3
SMALLEST_BURST_BYTES = 4096
QUEUE_BYTES = 4_000_000
RELAY = Path(__file__).with_name("relay.py")


@dataclass(frozen=True)
class Link:
    """What joins a worker to the switch.

    Args:
        bandwidth_bits_per_s: in each direction; None for as fast as the machine moves bytes.
        latency_s: added to every frame from one worker to another.
    """

    bandwidth_bits_per_s: float | None = None
    latency_s: float = 0.0


class Links:
    """The links of all workers; every link is alike.

    Args:
        namespaces: whose links.
        latency_s: of all links, for as long as they are there; the bandwidth may change.
    """

    def __init__(self, namespaces: Namespaces, latency_s: float = 0.0) -> None:
        self.namespaces = namespaces
        self.latency_s = latency_s
        self.bandwidth_bits_per_s: float | None = None
        self.relay: subprocess.Popen[str] | None = None
        self._delays_in_kernel = False

    def add(self) -> None:
        """Lay the links, unshaped."""
        self.namespaces.add()
        self._delays_in_kernel = self.latency_s > 0 and kernel_can_delay(self.namespaces.switch)
        if self.latency_s > 0 and not self._delays_in_kernel:
            self._start_relay()
        else:
            self.namespaces.add_veth()
        self.namespaces.connect()
        self.shape(None)

    def remove(self) -> None:
        """Remove the links and the namespaces; works half-way too."""
        self.namespaces.remove()
        if self.relay is not None:
            self.relay.communicate()
            self.relay = None

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
            if self._delays_in_kernel and is_port:
                command(*root, *parent, "netem", "delay", f"{self.latency_s * 1e6:.0f}us", "limit", "10000")

    def _is_shaped(self) -> bool:
        return self.bandwidth_bits_per_s is not None

    def _ends(self) -> list[tuple[str, str, bool]]:
        """Namespace and interface of both ends of every link, and whether it is the switch's."""
        own = [(worker, INTERFACE, False) for worker in self.namespaces.workers]
        switch = [(self.namespaces.switch, f"port{rank}", True) for rank in range(len(own))]
        return own + switch

    def _start_relay(self) -> None:
        """A process in the switch's namespace that makes both ends of all links and passes frames on."""
        count = self.namespaces.num_workers
        words = [sys.executable, str(RELAY), str(count), str(self.latency_s)]
        self.relay = subprocess.Popen(
            ["ip", "netns", "exec", self.namespaces.switch, *words],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.relay.stdout is not None
        if self.relay.stdout.readline().strip() != "ready":
            raise NetworkError(
                "delay needs netem or /dev/net/tun, this kernel offers neither to this process"
            )
        for rank, worker in enumerate(self.namespaces.workers):
            moved = ("dev", f"worker{rank}", "name", INTERFACE, "netns", worker)
            command("ip", "-n", self.namespaces.switch, "link", "set", *moved)


def kernel_can_delay(namespace: str) -> bool:
    """Whether the kernel has netem, found out on a namespace's own loopback."""
    words = ["tc", "-n", namespace, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "0ms"]
    can = subprocess.run(words, capture_output=True).returncode == 0
    if can:
        command("tc", "-n", namespace, "qdisc", "del", "dev", "lo", "root")
    return can


def token_bucket(bandwidth_bits_per_s: float) -> list[str]:
    """tc's words for a bandwidth."""
    burst_bytes = max(SMALLEST_BURST_BYTES, int(bandwidth_bits_per_s / 8 * BURST_S))
    words = f"tbf rate {bandwidth_bits_per_s:.0f}bit burst {burst_bytes} limit {QUEUE_BYTES}"
    return words.split()
