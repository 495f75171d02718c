"""Measures what work and messages cost on this machine, in a few seconds.

One process a worker of this machine (at least two, joined by gloo over loopback) times the cases. With
several workers on the machine all of them work at the same time, so that times include what they take from
one another; with one, the others sleep while it works.
"""

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessException, start_processes

from regtopk._version import __version__
from regtopk.core.options import check_choice, check_integer
from regtopk.errors import ClusterError
from regtopk.plan import cases, rounds, torch_hooks
from regtopk.plan.baselines import BUCKET_BYTES
from regtopk.plan.cases import Average, Point
from regtopk.plan.costs import Calibration, Line, fit

Progress = Callable[[float], None]
_SMALL_BYTES, _MESSAGE_BYTES = 64, 2**20
_NUM_CALLS = 24


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


def processor_name() -> str:
    """What the processor is called, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def calibrate(machine: Machine, progress: Progress = lambda fraction: None) -> Calibration:
    """Measure, and fit a line to each kind of work.

    Raises:
        ClusterError: a process failed.
    """
    context = get_context("spawn")
    said: Any = context.Queue()
    num_processes = max(2, machine.local_workers)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        arguments = machine, num_processes, store, said
        try:
            ranks = start_processes(_rank, arguments, nprocs=num_processes, join=False)
            while not ranks.join(timeout=0.2):
                while not said.empty():
                    answer = said.get()
                    if isinstance(answer, float):
                        progress(answer)
                    else:
                        points = answer
        except ProcessException as error:
            raise ClusterError(f"calibration failed: {error}") from error
    return Calibration(machine.describe(), _lines(points))


def _lines(points: Iterable[Point]) -> dict[str, Line]:
    by_line: dict[str, list[Any]] = {}
    for line, units, seconds in points:
        by_line.setdefault(line, []).append((units, seconds))
    return {line: fit(found) for line, found in by_line.items()}


def _rank(rank: int, machine: Machine, num_processes: int, store: str, said: Any) -> None:
    """One process: time every case together with the others, and let rank 0 hand over the means."""
    torch.set_num_threads(machine.threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes)
    alone = [dist.new_group([other]) for other in range(num_processes)][rank]
    points: list[Point] = []
    # Workers that share a machine wait for one another: seldom, but long. Only a mean counts that in full.
    average: Average = median if machine.local_workers == 1 else fmean
    tasks = list(_tasks(torch.device(machine.device), alone, average))
    for number, task in enumerate(tasks):
        needs_all = number == len(tasks) - 1  # the collectives
        works = rank == 0 or needs_all or machine.local_workers > 1
        torch.manual_seed(rank)
        dist.barrier()
        found = list(task()) if works else []
        points += _slowest(found, num_processes if machine.local_workers > 1 else 1)
        if rank == 0:
            said.put((number + 1) / len(tasks))
    if rank == 0:
        said.put(points)
    dist.barrier()
    dist.destroy_process_group()


def _tasks(device: torch.device, alone: Any, average: Average) -> Iterator[Callable[[], Iterable[Point]]]:
    for name in cases.planned_algorithms():
        yield partial(cases.algorithm_points, name, device, average)
    for code in (*cases.CODES, "sign", "none"):
        yield partial(cases.message_points, "gather", code, device, average)
    for code in (*cases.CODES, "sign"):
        yield partial(cases.message_points, "split", code, device, average)
    for code in cases.CODES:
        yield partial(cases.message_points, "dense", code, device, average)
        yield partial(cases.code_points, code, device, average)
    yield partial(cases.exchange_points, device, average)
    yield partial(cases.peer_points, device, average)
    yield partial(torch_hooks.hook_points, alone, device, average)
    yield partial(collective_points, average)


def _slowest(found: list[Point], num_ranks: int) -> list[Point]:
    """The points with the longest of all working ranks' times: a collective waits for the slowest.

    Of what takes long, ranks may have timed more or fewer points: those of all are kept.
    """
    if num_ranks == 1:
        return found
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, found)
    num_common = min(map(len, everyone))
    return [
        (line, units, max(theirs[n][2] for theirs in everyone))
        for n, (line, units, _) in enumerate(found[:num_common])
    ]


def collective_points(average: Average) -> Iterator[Point]:
    """Messages and bytes of gloo's collectives between the processes: what they cost without a network."""
    N = dist.get_world_size()
    for size in (_SMALL_BYTES, BUCKET_BYTES):
        vector, half = torch.zeros(size // 4), torch.zeros(size // 2, dtype=torch.float16)
        yield _collective(rounds.all_reduce(size, N), partial(dist.all_reduce, vector), average)
        half_move = rounds.all_reduce(size, N, "all_reduce half")
        yield _collective(half_move, partial(dist.all_reduce, half), average)
    for size in (_SMALL_BYTES, _MESSAGE_BYTES):
        vector, many = torch.zeros(size // 4), torch.zeros(N * (size // 4))
        yield _collective(rounds.broadcast(size, N), partial(dist.broadcast, vector, 0), average)
        yield _collective(rounds.all_to_all(size, N), partial(_all_to_all, many), average)
        yield _collective(rounds.all_gather(size, N), partial(_all_gather, many, vector), average)


def _all_to_all(parts: Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(parts), parts)


def _all_gather(gathered: Tensor, own: Tensor) -> None:
    single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    single(gathered, own)


def _collective(move: rounds.Move, run: Callable[[], Any], average: Average) -> Point:
    def step() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    num_calls = _NUM_CALLS if move.sent_bytes < BUCKET_BYTES else _NUM_CALLS // 4
    times = [step() for _ in range(num_calls)]
    units = {"messages": float(move.num_messages), "bytes": move.sent_bytes}
    return f"move {move.kind}", units, average(times[num_calls // 4 :])
