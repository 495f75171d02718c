"""Bytes that pass the relay arrive as they were, at the bandwidth and after the latency, and are counted."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.slow_network.relay import ask, wire_bytes
from benchmarks.slow_network.relayed import HOST, SOCKET, RelayedLinks
from tests.processes import free_port

LATENCY_S, BITS_PER_S = 0.03, 20e6
MESSAGE = bytes(range(256)) * 1000
LINK_S = 8 * wire_bytes(len(MESSAGE)) / BITS_PER_S  # of the message


@pytest.fixture
def links() -> Iterator[RelayedLinks]:
    links = RelayedLinks(3, LATENCY_S)
    links.add()
    links.shape(BITS_PER_S)
    yield links
    process = links._process
    links.remove()
    assert process is not None and process.returncode == 0


@contextmanager
def connection(
    links: RelayedLinks, sender: int, receiver: int
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection that one rank opens to another."""
    path = links.surroundings(sender)[SOCKET]
    with socket.create_server((HOST, 0)) as server:
        address = server.getsockname()
        ask(path, rank=receiver, listens_at=address)
        port = ask(path, rank=sender, leads_to=address, below=free_port())["port"]
        with socket.create_connection((HOST, port)) as near:
            far, _ = server.accept()
            with far:
                yield near, far


def received(end: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes > 0 and (part := end.recv(num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def test_latency_bandwidth_and_counts(links: RelayedLinks) -> None:
    with connection(links, 0, 1) as (near, far):
        start = time.perf_counter()
        near.sendall(b"?")
        assert received(far, 1) == b"?" and time.perf_counter() - start >= LATENCY_S
        far.sendall(MESSAGE)
        assert received(near, len(MESSAGE)) == MESSAGE
        assert time.perf_counter() - start >= 2 * LATENCY_S + LINK_S
        near.shutdown(socket.SHUT_WR)
        assert far.recv(1) == b""  # the end passes too
    found = {rank: ask(links.surroundings(rank)[SOCKET], counts_of=rank) for rank in range(3)}
    assert found[0]["sent"] == found[1]["received"] == wire_bytes(1)
    # chunks of it end between frames
    assert found[1]["sent"] == found[0]["received"] == pytest.approx(wire_bytes(len(MESSAGE)), rel=0.01)
    assert found[2] == {"sent": 0, "received": 0}


def test_who_shares_a_link_shares_its_bandwidth(links: RelayedLinks) -> None:
    """Two send to one: its link carries one after the other. Two that have nothing in common do not wait."""
    with connection(links, 0, 2) as (first, at_first), connection(links, 1, 2) as (second, at_second):
        for senders, at_least in (
            ((first, second), 2 * LINK_S),
            ((first,), LINK_S),
            ((at_first, second), LINK_S),
        ):
            start = time.perf_counter()
            ends = {first: at_first, second: at_second, at_first: first}
            threads = [threading.Thread(target=sender.sendall, args=(MESSAGE,)) for sender in senders]
            for thread in threads:
                thread.start()
            for sender in senders:
                assert received(ends[sender], len(MESSAGE)) == MESSAGE
            for thread in threads:
                thread.join()
            assert time.perf_counter() - start >= LATENCY_S + at_least
