"""Links through a relay: the process that starts it and changes its bandwidth, and what ranks do to use it.

gloo's ranks leave their addresses in a store, and of two ranks the one with the larger address connects to
the other. A `RelayedStore` hands it the address of a door of the relay instead, which is smaller too. gloo
compares ports as they lie in memory, in the network's byte order: the low byte counts most on usual machines.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from benchmarks.slow_network.namespaces import NetworkError
from benchmarks.slow_network.relay import ask

RELAY = Path(__file__).with_name("relay.py")
SOCKET = "SLOW_NETWORK_RELAY"  # names the relay's socket to ranks
HOST = "127.0.0.1"
# the start of a sockaddr_in: the family in the byte order of the machine, port and address in the network's
FAMILY, LOOPBACK = int(socket.AF_INET).to_bytes(2, sys.byteorder), socket.inet_aton(HOST)
ADDRESS = re.compile(re.escape(FAMILY) + b"(..)" + re.escape(LOOPBACK), re.DOTALL)


class RelayedLinks:
    """The links of all workers; every link is alike.

    Args:
        num_workers: how many.
        latency_s: of all links, for as long as they are there; the bandwidth may change.
    """

    shaper = "relay"

    def __init__(self, num_workers: int, latency_s: float = 0.0) -> None:
        self.num_workers, self.latency_s = num_workers, latency_s
        self._folder = tempfile.TemporaryDirectory(prefix="slow-relay-")
        self._path = os.path.join(self._folder.name, "relay")
        self._process: subprocess.Popen[str] | None = None

    def add(self) -> None:
        """Start the relay, unshaped."""
        words = [sys.executable, str(RELAY), self._path, str(self.num_workers), str(self.latency_s)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(words, **pipes, text=True, start_new_session=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise NetworkError("the relay did not start")

    def remove(self) -> None:
        """End the relay."""
        if self._process is not None:
            self._process.communicate()  # closes its standard input, with which it ends
            self._process = None
        self._folder.cleanup()

    def shape(self, bandwidth_bits_per_s: float | None) -> None:
        """Change the bandwidth of all links."""
        ask(self._path, bits_per_s=bandwidth_bits_per_s)

    def surroundings(self, rank: int) -> dict[str, str]:
        """The environment of a rank."""
        return {"GLOO_SOCKET_IFNAME": "lo", SOCKET: self._path}

    def namespace(self, rank: int) -> None:
        """A rank needs none."""


class RelayedStore(Store):
    """A store that leads gloo's connections to the relay.

    Args:
        store: where the ranks meet.
        rank: this one.
        path: of the relay's socket.
    """

    def __init__(self, store: Store, rank: int, path: str) -> None:
        super().__init__()
        self._store, self._rank, self._path = store, rank, path
        self._own_ports: dict[str, bytes] = {}  # by process group

    def set(self, key: str, value: Any) -> None:
        """Tell the relay where this rank listens, before others can know."""
        for found in ADDRESS.finditer(value):
            self._own_ports[_group(key)] = found[1]
            ask(self._path, rank=self._rank, listens_at=(HOST, _port(found[1])))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """The addresses that this rank will connect to are those of doors."""

        def door(found: re.Match[bytes]) -> bytes:
            own, other = self._own_ports[_group(key)], found[1]
            if int.from_bytes(other, sys.byteorder) >= int.from_bytes(own, sys.byteorder):
                return found[0]  # that rank connects, or it is this one
            leads_to = HOST, _port(other)
            port = ask(self._path, rank=self._rank, leads_to=leads_to, below=_port(own))["port"]
            return FAMILY + int(port).to_bytes(2, "big") + LOOPBACK

        return ADDRESS.sub(door, self._store.get(key))

    def add(self, key: str, amount: int) -> Any:
        """As it is."""
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        """As it is."""
        return self._store.compare_set(key, expected, value)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """As it is."""
        self._store.wait(keys, *timeout)

    def check(self, keys: list[str]) -> Any:
        """As it is."""
        return self._store.check(keys)

    def delete_key(self, key: str) -> Any:
        """As it is."""
        return self._store.delete_key(key)


def _port(found: bytes) -> int:
    return int.from_bytes(found, "big")


def _group(key: str) -> str:
    """A process group's part of the key of one of its ranks."""
    return key.rpartition("/")[0]
