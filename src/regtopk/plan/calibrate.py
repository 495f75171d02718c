"""Measures what work and messages cost on this machine.

There is one process per worker of this machine, at least two, joined by gloo over loopback. Several workers
all work at the same time, and processor time is counted. A single one works alone while the other process
sleeps, and elapsed time is counted.
"""

import hashlib
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessException, start_processes

from regtopk._version import __version__
from regtopk.algorithms import ALGORITHMS
from regtopk.core.options import check_choice, check_integer
from regtopk.errors import ClusterError
from regtopk.plan import cases, moves, torch_hooks
from regtopk.plan.baselines import BUCKET_BYTES
from regtopk.plan.bench import Bench
from regtopk.plan.cases import Point
from regtopk.plan.costs import Calibration, Units, fit
from regtopk.plan.methods import CODES, PEER, line_of

Progress = Callable[[float], None]
MOVES = ("all_reduce", "all_reduce half", "broadcast", "all_to_all", "all_gather")
_SMALL_BYTES, _MESSAGE_BYTES = 64, 2**20
_NUM_CALLS = 24


class Task(NamedTuple):
    """Something to measure: the names of the lines it gives points of, and how."""

    lines: tuple[str, ...]
    run: Callable[[], Iterable[Point]]
    needs_all: bool = False  # all processes must take part


@dataclass(frozen=True)
class Machine:
    """What a calibration depends on.

    Args:
        local_workers: how many workers share this machine.
        num_threads: of each; 0 for torch's own number, or the cores each worker gets.
        device: "cpu" or "cuda".
    """

    local_workers: int = 1
    num_threads: int = 0
    device: str = "cpu"

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
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def calibrate(
    machine: Machine, lines: Iterable[str], progress: Progress = lambda fraction: None
) -> Calibration:
    """Measure some kinds of work, and fit a line to each.

    Args:
        machine: this one, and how it is used.
        lines: the names of the costs that are needed; those measured with them come too.
        progress: called with the fraction done.

    Raises:
        ClusterError: a process failed.
    """
    found: Any = get_context("spawn").Queue()
    num_processes = max(2, machine.local_workers)
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = machine, num_processes, str(Path(folder) / "store"), frozenset(lines), found
        try:
            ranks = start_processes(_rank, arguments, nprocs=num_processes, join=False, daemon=True)
            is_done = False
            while not is_done:
                is_done = ranks.join(timeout=0.2)
                while not found.empty():
                    fraction, more = found.get()
                    points += more
                    progress(fraction)
        except ProcessException as error:
            raise ClusterError(f"calibration failed: {error}") from error
    by_line: dict[str, list[tuple[Units, float]]] = {}
    for line, units, seconds in points:
        by_line.setdefault(line, []).append((units, seconds))
    return Calibration(machine.describe(), {line: fit(of_line) for line, of_line in by_line.items()})


def _rank(
    rank: int, machine: Machine, num_processes: int, store: str, lines: frozenset[str], found: Any
) -> None:
    """One process: time every task together with the others; rank 0 hands over what they found."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's, with whom this process ends
    torch.set_num_threads(machine.threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes)
    alone = [dist.new_group([other]) for other in range(num_processes)][rank]
    bench = Bench.of(machine.device, machine.local_workers, machine.threads, os.cpu_count() or 1)
    chosen = [task for task in _tasks(alone, bench) if not lines.isdisjoint(task.lines)]
    for number, task in enumerate(chosen):
        works = rank == 0 or task.needs_all or machine.local_workers > 1
        torch.manual_seed(rank)
        dist.barrier()
        points = list(task.run()) if works else []
        if machine.local_workers > 1:
            points = _mean(points, num_processes)
        if rank == 0:
            found.put(((number + 1) / len(chosen), points))
    dist.barrier()
    dist.destroy_process_group()


def measurable_lines() -> set[str]:
    """The names of all costs that can be measured."""
    return {line for task in _tasks(None, Bench(torch.device("cpu"))) for line in task.lines}


def _tasks(alone: Any, bench: Bench) -> Iterator[Task]:
    for name in ALGORITHMS:
        yield Task((f"select {name}",), partial(cases.algorithm_points, name, bench))
    for kind, codes in cases.MESSAGES.items():
        before = "" if kind == "gather" else f"{kind} "
        for code in codes:
            lines = f"{before}encode {code}", f"{before}decode {code}"
            yield Task(lines, partial(cases.message_points, kind, code, bench))
    for code in CODES:
        yield Task((f"quantise {code}",), partial(cases.code_points, code, bench))
    yield Task(("exchange",), partial(cases.exchange_points, bench))
    yield Task((PEER,), partial(cases.peer_points, bench))
    yield Task(("ddp", "fp16", "powersgd"), partial(torch_hooks.hook_points, alone, bench))
    yield Task(tuple(f"move {kind}" for kind in MOVES), partial(collective_points, bench), needs_all=True)


def _mean(found: list[Point], num_ranks: int) -> list[Point]:
    """The points with the mean of all ranks' times; a point that not all ranks timed is dropped."""
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, found)
    num_common = min(map(len, everyone))
    return [
        (line, units, fmean(theirs[n][2] for theirs in everyone))
        for n, (line, units, _) in enumerate(found[:num_common])
    ]


def collective_points(bench: Bench) -> Iterator[Point]:
    """Messages and bytes of gloo's collectives between the processes: what they cost without a network."""
    N = dist.get_world_size()
    for size in (_SMALL_BYTES, BUCKET_BYTES):
        vector, half = torch.zeros(size // 4), torch.zeros(size // 2, dtype=torch.float16)
        yield _collective(moves.all_reduce(size, N), partial(dist.all_reduce, vector), bench)
        half_move = moves.all_reduce(size, N, "all_reduce half")
        yield _collective(half_move, partial(dist.all_reduce, half), bench)
    for size in (_SMALL_BYTES, _MESSAGE_BYTES):
        vector, many = torch.zeros(size // 4), torch.zeros(N * (size // 4))
        yield _collective(moves.broadcast(size, N), partial(dist.broadcast, vector, 0), bench)
        yield _collective(moves.all_to_all(size, N), partial(_all_to_all, many), bench)
        yield _collective(moves.all_gather(size, N), partial(_all_gather, many, vector), bench)


def _all_to_all(parts: Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(parts), parts)


def _all_gather(gathered: Tensor, own: Tensor) -> None:
    single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    single(gathered, own)


def _collective(move: moves.Move, run: Callable[[], Any], bench: Bench) -> Point:
    """Many calls after one another, since processes come to a single one at different times."""
    num_calls = _NUM_CALLS if move.sent_bytes < BUCKET_BYTES else _NUM_CALLS // 6
    run()
    dist.barrier()
    seconds = bench.seconds(lambda: [run() for _ in range(num_calls)]) / num_calls
    units = {"messages": float(move.num_messages), "bytes": move.sent_bytes}
    return line_of(move), units, seconds
