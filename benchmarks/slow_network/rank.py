"""What every rank of a measurement does: join the others, read its job, record, ask for links."""

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from benchmarks.slow_network.namespaces import INTERFACE
from benchmarks.slow_network.relay import ask
from benchmarks.slow_network.relayed import SOCKET, RelayedStore

TIMEOUT = timedelta(minutes=10)


@contextmanager
def joined() -> Iterator["Rank"]:
    """This process as one rank, from the environment that `launch` made."""
    torch.set_num_threads(1)
    rank = Rank()
    store: Store = FileStore(str(rank.folder / "store"), rank.num_workers)
    if rank.relay is not None:
        store = RelayedStore(store, rank.index, rank.relay)
    place: dict[str, Any] = {"rank": rank.index, "world_size": rank.num_workers}
    dist.init_process_group("gloo", store=store, **place, timeout=TIMEOUT)
    rank.check_relay()
    try:
        yield rank
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Rank:
    """One rank's side of `launch`."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["SLOW_NETWORK_FOLDER"])
        self.job: dict[str, Any] = json.loads((self.folder / "job.json").read_text(encoding="utf-8"))
        self.index, self.num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.relay = os.environ.get(SOCKET)  # that its bytes pass; None: the kernel shapes its link
        self.num_asked = self.num_gathered = 0
        self.busiest_bytes = 0.0  # that left in any 100 ms while the link was watched last

    @contextmanager
    def watching_the_link(self) -> Iterator[None]:
        """Look at the interface's count every 10 ms, in a thread."""
        counts: list[tuple[float, float]] = []
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.01):
                counts.append((time.perf_counter(), self.interface_bytes()[0]))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()
        self.busiest_bytes = busiest(counts)

    def interface_bytes(self) -> tuple[float, float]:
        """Bytes that have left and reached this rank, headers included, as the kernel or the relay counts."""
        if self.relay is None:
            return kernel_bytes()
        counts = ask(self.relay, counts_of=self.index)
        return counts["sent"], counts["received"]

    def relay_state(self) -> dict[str, float]:
        """What the relay says of itself, to rank 0; nothing to others, or without a relay."""
        return ask(self.relay) if self.relay is not None and self.index == 0 else {}

    def check_relay(self) -> None:
        """Nothing is measured on connections that do not pass the relay."""
        dist.barrier()
        found = self.relay_state().get("num_connections")
        assert found in (None, self.num_workers * (self.num_workers - 1) / 2), f"{found} pass the relay"

    def record(self, record: dict[str, Any]) -> None:
        """Hand a record to the process that launched the ranks; rank 0's counts."""
        if self.index == 0:
            print(json.dumps(record), flush=True)

    def ask_for_links(self, bandwidth_bits_per_s: float | None) -> None:
        """Wait until all links have this bandwidth; all ranks call it."""
        self.gathered()
        self.record({"ask": bandwidth_bits_per_s})
        answer = self.folder / f"answer-{self.num_asked}"
        while not answer.exists():
            time.sleep(0.01)
        self.num_asked += 1

    def gathered(self, number: float = 0.0) -> list[float]:
        """Every rank's number. All ranks wait for one another, by files: nothing travels over the links."""
        self.num_gathered += 1
        names = [f"{self.num_gathered}-{rank}" for rank in range(self.num_workers)]
        part = self.folder / f"part-{self.index}"
        part.write_text(number.hex(), encoding="ascii")
        part.rename(self.folder / names[self.index])
        for name in names:
            while not (self.folder / name).exists():
                time.sleep(0.001)
        return [float.fromhex((self.folder / name).read_text(encoding="ascii")) for name in names]

    def slowest(self, seconds: float) -> float:
        """The longest of all ranks' times."""
        return max(self.gathered(seconds))

    def total(self, number: float) -> float:
        """The sum of all ranks' numbers."""
        return sum(self.gathered(number))

    def first(self, number: float) -> float:
        """Rank 0's number, on all ranks."""
        return self.gathered(number)[0]


def busiest(counts: Sequence[tuple[float, float]], window_s: float = 0.1) -> float:
    """The most that was added to a count within any window; counts are (time, bytes so far)."""
    most, first = 0.0, 0
    for now, total in counts:
        while now - counts[first][0] > window_s:
            first += 1
        most = max(most, total - counts[first][1])
    return most


def processors_busy_s() -> float:
    """Seconds that all processors together have spent in processes since the machine started."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=4)
    return sum(int(field) for field in fields[1:4]) / os.sysconf("SC_CLK_TCK")  # user, nice, system


def kernel_bytes() -> tuple[int, int]:
    """Bytes that left and reached this namespace's interface, by the kernel's count, headers included."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise RuntimeError(f"there is no interface {INTERFACE!r} in this network namespace")
