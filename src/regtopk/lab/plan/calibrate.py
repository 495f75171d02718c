"""Measures what work and messages cost on this machine.

Two processes are joined by gloo over loopback. One does all the work. The other takes part in collectives.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessException, start_processes

from regtopk._version import __version__
from regtopk.errors import ClusterError
from regtopk.lab.plan.cases import CASES, Case, collective_points
from regtopk.lab.plan.costs import Calibration, fit
from regtopk.lab.plan.exchange import Units

NUM_PROCESSES = 2


def describe_machine(device: str) -> dict[str, Any]:
    """Everything that costs depend on."""
    return {
        "regtopk": __version__,
        "torch": torch.__version__,
        "processor": _processor_name(),
        "num_cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "num_threads": torch.get_num_threads(),
    }


def cache_path(device: str) -> Path:
    """Where this machine's calibration is kept: in $XDG_CACHE_HOME/regtopk, or ~/.cache/regtopk."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    key = hashlib.sha256(json.dumps(describe_machine(device), sort_keys=True).encode()).hexdigest()
    return Path(root) / "regtopk" / f"costs-{key[:16]}.json"


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return name[1] if name else platform.processor() or platform.machine()


def calibrate(device: str, progress: Callable[[float], None], of: Sequence[Case] = CASES) -> Calibration:
    """Measure collectives and all work `of` one process, and fit a line to each kind.

    Args:
        device: cpu or cuda, where vectors are selected and coded.
        progress: called with the fraction done.
        of: the work that one process can time.
    """
    measured: Any = get_context("spawn").SimpleQueue()
    points: dict[str, list[tuple[Units, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        arguments = device, torch.get_num_threads(), f"{folder}/store", of, measured
        try:
            ranks = start_processes(_rank, arguments, nprocs=NUM_PROCESSES, join=False, daemon=True)
            is_done = False
            while not is_done:
                is_done = ranks.join(timeout=0.2)
                while not measured.empty():
                    fraction, work, seconds = measured.get()
                    points[work.line].append((work.units, seconds))
                    progress(fraction)
        except ProcessException as error:
            raise ClusterError(f"calibration failed: {error}") from error
    return Calibration(describe_machine(device), {line: fit(times) for line, times in points.items()})


def _rank(rank: int, device: str, num_threads: int, store: str, of: Sequence[Case], measured: Any) -> None:
    """One process: rank 0 hands over what it measures."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it silently; torch sends it if the caller ends
    torch.set_num_threads(num_threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_PROCESSES)
    torch.manual_seed(rank)
    measurements = [collective_points, *(of if rank == 0 else ())]
    for number, measure in enumerate(measurements, start=1):
        for work, seconds in measure(torch.device(device)):
            if rank == 0:
                measured.put((number / len(measurements), work, seconds))
    dist.barrier()
    dist.destroy_process_group()
