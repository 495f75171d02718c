"""Links of a bandwidth and a latency where the kernel offers none: a process that the ranks' bytes pass.

    relay.py SOCKET NUM_WORKERS LATENCY_S

A rank's connection to another ends here, and a second one leads on. Both ends of every link have a bandwidth:
bytes leave their sender at that rate, travel for the latency, and enter their receiver at that rate, after
what others send it. Frames' headers and acknowledgements take their time too. What the bandwidth does not let
through yet stays in the sender's own buffers. TCP's slow start is not modelled.

Requests come to SOCKET, one JSON object per connection (`Relay.answer`). The process ends with its standard
input. It needs no right, no module of the kernel, and nothing but Python's library.
"""

import heapq
import json
import math
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from itertools import product
from typing import Any, NamedTuple

SEGMENT_BYTES, HEADER_BYTES = 1448, 66 + 66 / 2  # payload of a frame, its header and half an acknowledgement
CHUNK_S = 2e-3  # of the link, that is read at once, in whole frames
MOST_FRAMES = 45
AHEAD_S = 10e-3  # so early a chunk may be read: a wake-up that is late by less wastes nothing of the link
MOST_UNDER_WAY = 2**23  # bytes of one direction
HIGH_BYTES = range(39, 62)  # of a door's port: below all ports that a kernel gives to sockets by itself
Address = tuple[str, int]


class Flow:
    """One direction of a connection between two ranks."""

    def __init__(self, sender: int, receiver: int, source: socket.socket, sink: socket.socket) -> None:
        self.sender, self.receiver, self.source, self.sink = sender, receiver, source, sink
        self.num_under_way = 0  # bytes
        self.arrived: deque[bytes] = deque()  # what the receiver's buffer has no room for yet
        self.is_over = False  # nothing more comes from the sender


class Event(NamedTuple):
    """A chunk reaches its receiver's link, or has passed it; an empty one is the end of the flow."""

    due: float
    number: int  # events that are due at the same time keep their order
    has_passed: bool
    flow: Flow
    chunk: bytes


class Relay:
    """All links; every rank's is alike.

    Args:
        num_workers: how many ranks.
        latency_s: from one rank to another.
    """

    def __init__(self, num_workers: int, latency_s: float) -> None:
        self.latency_s = latency_s
        self.bits_per_s = math.inf
        self.owners: dict[Address, int] = {}  # ranks, by the addresses that they listen at
        self.doors: dict[socket.socket, tuple[int, Address]] = {}  # who comes in by it, and where it leads
        self.ports: dict[tuple[int, Address], int] = {}
        self.flows: deque[Flow] = deque()  # whose turn comes first
        self.events: list[Event] = []
        self.num_events = 0
        self.out_free_at, self.in_free_at = [0.0] * num_workers, [0.0] * num_workers
        self.sent, self.received = [0.0] * num_workers, [0.0] * num_workers  # bytes, with headers
        self.late_s = 0.0  # the latest that a chunk was handed over, since that was last asked

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What a rank, or the process that started all, wants to know or to have."""
        if "listens_at" in request:
            self.owners[_address(request["listens_at"])] = request["rank"]
        if "leads_to" in request:
            return {"port": self._door(request["rank"], _address(request["leads_to"]), request["below"])}
        if "bits_per_s" in request:
            self.bits_per_s = request["bits_per_s"] or math.inf
        if "counts_of" in request:
            return {"sent": self.sent[request["counts_of"]], "received": self.received[request["counts_of"]]}
        late_s, self.late_s = self.late_s, 0.0
        return {"num_connections": len(self.flows) // 2, "busy_s": time.process_time(), "late_s": late_s}

    def run(self, requests: socket.socket, end: int) -> None:
        """Serve until `end` has nothing more to read."""
        while True:
            now = time.monotonic()
            self._move(now)
            sources = {flow.source: flow for flow in self.flows if self._may_read(flow, now)}
            full = {flow.sink: flow for flow in self.flows if flow.arrived}
            wait_s = self._next_turn(now)
            awaited: list[Any] = [requests, end, *self.doors, *sources]
            readable, writable, _ = select.select(awaited, full, (), wait_s)
            for sink in writable:
                self._hand_over(full[sink])
            for source in readable:
                if source == end:
                    return
                if source is requests:
                    self._serve(requests)
                elif source in self.doors:
                    self._connect(source)
                else:
                    self._read(sources[source])

    def _may_read(self, flow: Flow, now: float) -> bool:
        has_room = flow.num_under_way < MOST_UNDER_WAY and not flow.is_over
        return has_room and self.out_free_at[flow.sender] <= now + AHEAD_S

    def _next_turn(self, now: float) -> float | None:
        """How long there is nothing to do, unless something comes in."""
        turns = [free_at - AHEAD_S for free_at in self.out_free_at if free_at > now + AHEAD_S]
        turns += [self.events[0].due] if self.events else []
        return max(0.0, min(turns) - now) if turns else None

    def _read(self, flow: Flow) -> None:
        """Let a chunk leave its sender; the other flows of that sender come first next time."""
        now = time.monotonic()
        if not self._may_read(flow, now):  # another flow has taken the link
            return
        num_frames = int(min(max(1.0, self.bits_per_s * CHUNK_S / 8 / SEGMENT_BYTES), MOST_FRAMES))
        try:
            chunk = flow.source.recv(num_frames * SEGMENT_BYTES)
        except OSError:
            chunk = b""
        flow.is_over = not chunk
        self.flows.remove(flow)
        self.flows.append(flow)
        start = max(now, self.out_free_at[flow.sender])
        self.out_free_at[flow.sender] = start + self._seconds(chunk)
        self.sent[flow.sender] += wire_bytes(len(chunk))
        flow.num_under_way += len(chunk)
        self._schedule(start + self.latency_s, False, flow, chunk)

    def _move(self, now: float) -> None:
        """All that is due."""
        while self.events and self.events[0].due <= now:
            due, _, has_passed, flow, chunk = heapq.heappop(self.events)
            if has_passed:
                self.late_s = max(self.late_s, time.monotonic() - due)
                self.received[flow.receiver] += wire_bytes(len(chunk))
                flow.arrived.append(chunk)
                self._hand_over(flow)
            else:
                passed = max(due, self.in_free_at[flow.receiver]) + self._seconds(chunk)
                self.in_free_at[flow.receiver] = passed
                self._schedule(passed, True, flow, chunk)

    def _schedule(self, due: float, has_passed: bool, flow: Flow, chunk: bytes) -> None:
        self.num_events += 1
        heapq.heappush(self.events, Event(due, self.num_events, has_passed, flow, chunk))

    def _hand_over(self, flow: Flow) -> None:
        """As much of what has arrived as the receiver has room for."""
        try:
            while flow.arrived:
                chunk = flow.arrived.popleft()
                if not chunk:
                    self.flows.remove(flow)
                    flow.sink.shutdown(socket.SHUT_WR)
                    continue
                num_taken = flow.sink.send(chunk)
                flow.num_under_way -= num_taken
                if num_taken < len(chunk):
                    flow.arrived.appendleft(chunk[num_taken:])
        except BlockingIOError:
            flow.arrived.appendleft(chunk)
        except OSError:  # the receiver is gone, and so is what was for it
            flow.arrived.clear()

    def _seconds(self, chunk: bytes) -> float:
        return 8 * wire_bytes(len(chunk)) / self.bits_per_s

    def _door(self, rank: int, target: Address, below: int) -> int:
        """The port by which a rank reaches an address of another; its low byte is at most that of `below`."""
        if (rank, target) not in self.ports:
            for low, high in product(range(below % 256, -1, -1), HIGH_BYTES):
                with suppress(OSError):  # in use
                    door = socket.create_server((target[0], 256 * high + low))
                    self.doors[door] = rank, target
                    self.ports[rank, target] = 256 * high + low
                    break
        return self.ports[rank, target]

    def _connect(self, door: socket.socket) -> None:
        rank, target = self.doors[door]
        near, _ = door.accept()
        far = socket.create_connection(target)
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other = self.owners[target]
        self.flows += [Flow(rank, other, near, far), Flow(other, rank, far, near)]

    def _serve(self, requests: socket.socket) -> None:
        connection, _ = requests.accept()
        with connection, connection.makefile("rw", encoding="utf-8") as lines:
            json.dump(self.answer(json.loads(lines.readline())), lines)


def _address(pair: list[Any]) -> Address:
    host, port = pair
    return host, port


def wire_bytes(num_bytes: int) -> float:
    """What bytes of payload are on a link."""
    return num_bytes + HEADER_BYTES * math.ceil(num_bytes / SEGMENT_BYTES)


def ask(path: str, **request: Any) -> dict[str, Any]:
    """The answer of the relay that serves at a path."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile(encoding="utf-8") as lines:
            answer: dict[str, Any] = json.load(lines)
    return answer


def main() -> None:
    path, num_workers, latency_s = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as requests:
        requests.bind(path)
        requests.listen(64)
        print("ready", flush=True)
        Relay(int(num_workers), float(latency_s)).run(requests, sys.stdin.fileno())


if __name__ == "__main__":
    main()
