"""What do the links carry while all workers send at once? One rank's side; run by `launch`.

Every rank sends one plain TCP stream to the next, as in a ring, and counts what it receives from the last.
"""

import socket
import threading
import time

import torch
import torch.distributed as dist

from benchmarks.slow_network.rank import Rank, joined

PORT = 29600
CHUNK = bytes(2**16)
BUFFER_BYTES = 2**18
SKIP_S, COUNT_S = 0.5, 2.0


def main() -> None:
    with joined() as rank:
        for number, bandwidth in enumerate(rank.job["bandwidths_bits_per_s"]):
            rank.ask_for_links(bandwidth)
            achieved = received_bits_per_s(rank, PORT + number)
            rank.ask_for_links(None)
            rank.record(
                {
                    "workers": rank.num_workers,
                    "bandwidth_bits_per_s": bandwidth,
                    "latency_s": rank.job["latency_s"],
                    "achieved_bits_per_s": achieved,
                }
            )


def received_bits_per_s(rank: Rank, port: int) -> float:
    """Payload that reaches a rank while all send, the mean over ranks."""
    addresses: list[str] = rank.job["addresses"]
    with socket.create_server((addresses[rank.index], port)) as server:
        dist.barrier()
        to_next = socket.create_connection((addresses[(rank.index + 1) % rank.num_workers], port))
        from_last, _ = server.accept()
    to_next.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    is_over = threading.Event()
    sender = threading.Thread(target=send, args=(to_next, is_over))
    dist.barrier()
    sender.start()
    receive(from_last, SKIP_S)
    num_bytes, seconds = receive(from_last, COUNT_S)
    is_over.set()
    from_last.close()  # also frees the other end's sender, if it waits for room
    sender.join()
    bits_per_s = torch.tensor([8 * num_bytes / seconds], dtype=torch.float64)
    dist.all_reduce(bits_per_s)
    return float(bits_per_s) / rank.num_workers


def send(connection: socket.socket, is_over: threading.Event) -> None:
    try:
        while not is_over.is_set():
            connection.sendall(CHUNK)
    except OSError:
        pass  # the receiver has counted enough
    connection.close()


def receive(connection: socket.socket, seconds: float) -> tuple[int, float]:
    """Bytes received in about so many seconds, and the seconds it took."""
    start, num_bytes = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds:
        num_bytes += len(connection.recv(len(CHUNK)))
    return num_bytes, elapsed
