"""Measures what work and messages cost on this machine.

There is one process per worker of this machine, at least two, joined by gloo over loopback. Several workers
all work at the same time, and the processor time of the first is counted. A single one works alone while the
other process sleeps, and elapsed time is counted.
"""

import hashlib
import json
import os
import platform
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessException, start_processes

from regtopk._version import __version__
from regtopk.core.options import check_choice, check_integer
from regtopk.errors import ClusterError
from regtopk.lab.plan import cases
from regtopk.lab.plan.bench import Bench
from regtopk.lab.plan.cases import Point
from regtopk.lab.plan.costs import Line, fit
from regtopk.lab.plan.exchange import Units

Measurement = tuple[Callable[..., Iterator[Point]], tuple[str, ...]]  # a function, and what of


@dataclass(frozen=True)
class Machine:
    """What a calibration depends on."""

    local_workers: int = 1  # that share this machine
    num_threads: int = 0  # of each; 0 for torch's own number, or the cores each worker gets
    device: str = "cpu"  # or "cuda"

    def __post_init__(self) -> None:
        """Check the options."""
        check_integer("local_workers", self.local_workers, at_least=1)
        check_integer("num_threads", self.num_threads, at_least=0)
        check_choice("device", self.device, ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",))

    @property
    def threads(self) -> int:
        """How many threads a worker has."""
        if self.num_threads:
            return self.num_threads
        if self.local_workers == 1:
            return torch.get_num_threads()
        return max(1, (os.cpu_count() or 1) // self.local_workers)

    def describe(self) -> dict[str, Any]:
        """Everything that costs depend on, for the cache and for records."""
        return {
            "regtopk": __version__,
            "torch": torch.__version__,
            "processor": processor_name(),
            "num_cores": os.cpu_count(),
            "device": torch.cuda.get_device_name() if self.device == "cuda" else "cpu",
            "num_threads": self.threads,
            "local_workers": self.local_workers,
        }

    @property
    def path(self) -> Path:
        """Where its calibration is kept: in $XDG_CACHE_HOME/regtopk, or ~/.cache/regtopk."""
        root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        key = hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()
        return Path(root) / "regtopk" / f"calibration-{key[:16]}.json"


def processor_name() -> str:
    """What the processor is called, as far as the system tells."""
    told = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.+)", told.read_text(encoding="utf-8")) if told.exists() else None
    return name[1] if name else platform.processor() or platform.machine()


def measurement_of(line: str) -> Measurement:
    """How the cost of that name is measured; several may come from one measurement."""
    kind, *words = line.split(" ")
    if kind in ("encode", "decode"):
        return cases.message_points, ("gather", *words)
    if kind in ("split", "dense"):
        return cases.message_points, (kind, *words[1:])
    if kind in ("ddp", "fp16", "powersgd"):
        return cases.hook_points, ()
    if kind == "move":
        return cases.collective_points, ()
    measured: dict[str, Callable[..., Iterator[Point]]] = {
        "select": cases.algorithm_points,
        "quantise": cases.code_points,
        "updates": cases.update_points,
        "exchange": cases.exchange_points,
    }
    return measured[kind], tuple(words)


def calibrate(
    machine: Machine, lines: Iterable[str], progress: Callable[[float], None] = lambda fraction: None
) -> dict[str, Line]:
    """Measure some kinds of work, and fit a line to each.

    Args:
        machine: this one, and how it is used.
        lines: the names of the costs that are needed; those measured with them come too.
        progress: called with the fraction done.

    Raises:
        ClusterError: a process failed.
    """
    measured: Any = get_context("spawn").Queue()
    num_processes = max(2, machine.local_workers)
    found: dict[str, Line] = {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = machine, num_processes, f"{folder}/store", sorted(lines), measured
        try:
            ranks = start_processes(_rank, arguments, nprocs=num_processes, join=False, daemon=True)
            is_done = False
            while not is_done:
                is_done = ranks.join(timeout=0.2)
                while not measured.empty():
                    fraction, more = measured.get()
                    found |= more
                    progress(fraction)
        except ProcessException as error:
            raise ClusterError(f"calibration failed: {error}") from error
    return found


def _rank(
    rank: int, machine: Machine, num_processes: int, store: str, lines: list[str], measured: Any
) -> None:
    """One process: measure everything together with the others; rank 0 hands over what they found."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller, and this process ends with it
    torch.set_num_threads(machine.threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes)
    bench = Bench.of(machine.device, machine.local_workers, machine.threads, os.cpu_count() or 1)
    measurements = list(dict.fromkeys(map(measurement_of, lines)))
    for number, (measure, of) in enumerate(measurements, start=1):
        torch.manual_seed(rank)
        dist.barrier()
        takes_part = rank == 0 or machine.local_workers > 1 or measure is cases.collective_points
        points: dict[str, list[tuple[Units, float]]] = defaultdict(list)
        for work, seconds in measure(bench, *of) if takes_part else ():
            points[work.line].append((work.units, seconds))
        if rank == 0:
            measured.put((number / len(measurements), {line: fit(points[line]) for line in points}))
    dist.barrier()
    dist.destroy_process_group()
