"""What every rank of a measurement does: join the others, read its job, record, ask for links."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.slow_network.namespaces import INTERFACE

TIMEOUT = timedelta(minutes=10)


@contextmanager
def joined() -> Iterator["Rank"]:
    """This process as one rank, from the environment that `launch` made."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = Rank()
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
        self.index, self.num_workers = dist.get_rank(), dist.get_world_size()
        self.num_asked = 0
        self.busiest_bytes = 0  # that left in any 100 ms while the link was watched last

    @contextmanager
    def watching_the_link(self) -> Iterator[None]:
        """Look at the interface's count every 10 ms, in a thread."""
        counts: list[tuple[float, int]] = []
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.01):
                counts.append((time.perf_counter(), interface_bytes()[0]))

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()
        self.busiest_bytes = busiest(counts)

    def record(self, record: dict[str, Any]) -> None:
        """Hand a record to the process that launched the ranks; rank 0's counts."""
        if self.index == 0:
            print(json.dumps(record), flush=True)

    def ask_for_links(self, bandwidth_bits_per_s: float | None) -> None:
        """Wait until all links have this bandwidth; all ranks call it."""
        dist.barrier()
        self.record({"ask": bandwidth_bits_per_s})
        answer = self.folder / f"answer-{self.num_asked}"
        while not answer.exists():
            time.sleep(0.01)
        self.num_asked += 1
        dist.barrier()

    def slowest(self, seconds: float) -> float:
        """The longest of all ranks' times."""
        longest = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    def total(self, seconds: float) -> float:
        """The sum of all ranks' times."""
        total = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def first(self, seconds: float) -> float:
        """Rank 0's time, on all ranks."""
        return self.total(seconds if self.index == 0 else 0.0)


def busiest(counts: list[tuple[float, int]], window_s: float = 0.1) -> int:
    """The most that was added to a count within any window; counts are (time, bytes so far)."""
    most, first = 0, 0
    for now, total in counts:
        while now - counts[first][0] > window_s:
            first += 1
        most = max(most, total - counts[first][1])
    return most


def processors_busy_s() -> float:
    """Seconds that all processors together have spent in processes since the machine started."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=4)
    return sum(int(field) for field in fields[1:4]) / os.sysconf("SC_CLK_TCK")  # user, nice, system


def interface_bytes() -> tuple[int, int]:
    """Bytes that left and reached this namespace's interface, by the kernel's count, headers included."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise RuntimeError(f"there is no interface {INTERFACE!r} in this network namespace")
