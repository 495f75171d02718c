"""A relay of Ethernet frames that holds each for a while: a link's delay where the kernel has no netem.

    relay.py NUM_LINKS LATENCY_S

Makes 2 TAP interfaces a link, worker0, worker1, ... and port0, port1, ..., prints "ready", and passes every
frame that comes out of one on into the other. A frame from one worker to another crosses two links; each
holds it for half of the delay. The interfaces go with the process.
"""

import contextlib
import fcntl
import heapq
import os
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
LONGEST_FRAME = 65536


def make_tap(name: str) -> int:
    """A file descriptor that reads and writes the frames of a new interface."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def relay(other_end: dict[int, int], delay_s: float) -> None:
    """Pass frames on, each `delay_s` after it came, until the process is ended."""
    due: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait_s = max(0.0, due[0][0] - time.monotonic()) if due else None
        for tap in select.select(other_end, (), (), wait_s)[0]:
            with contextlib.suppress(BlockingIOError, OSError):  # OSError: the interface is not up
                while True:
                    frame = os.read(tap, LONGEST_FRAME)
                    heapq.heappush(due, (time.monotonic() + delay_s, count, other_end[tap], frame))
                    count += 1
        while due and due[0][0] <= time.monotonic():
            _, _, tap, frame = heapq.heappop(due)
            with contextlib.suppress(OSError):  # a frame for an interface that is not up is lost
                os.write(tap, frame)


def main() -> None:
    num_links, latency_s = int(sys.argv[1]), float(sys.argv[2])
    other_end: dict[int, int] = {}
    for link in range(num_links):
        worker, port = make_tap(f"worker{link}"), make_tap(f"port{link}")
        other_end |= {worker: port, port: worker}
    print("ready", flush=True)
    relay(other_end, latency_s / 2)


if __name__ == "__main__":
    main()
