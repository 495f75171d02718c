"""Measures what work and messages cost on this machine, in about a minute.

One process a worker of this machine (at least two, joined by gloo over loopback) times the cases. With
several workers on the machine all of them work at the same time, and processor time is counted; with one, the
others sleep while it works, and the wall's clock counts.
"""

import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
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
from regtopk.plan.cases import Point
from regtopk.plan.clock import Clock
from regtopk.plan.costs import Calibration, Line, fit

Progress = Callable[[float], None]
Task = Callable[[], Iterable[Point]]
COLLECTIVES = "collectives"
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


def calibrate(
    machine: Machine, progress: Progress = lambda fraction: None, only: Sequence[str] = ()
) -> Calibration:
    """Measure, and fit a line to each kind of work.

    Args:
        machine: this one, and how it is used.
        progress: called with the fraction done.
        only: names of tasks; all of them if there are none.

    Raises:
        ClusterError: a process failed.
    """
    said: Any = get_context("spawn").Queue()
    num_processes = max(2, machine.local_workers)
    points: list[Point] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = machine, num_processes, str(Path(folder) / "store"), tuple(only), said
        try:
            ranks = start_processes(_rank, arguments, nprocs=num_processes, join=False, daemon=True)
            is_done = False
            while not is_done:
                is_done = ranks.join(timeout=0.2)
                while not said.empty():
                    fraction, found = said.get()
                    points += found
                    progress(fraction)
        except ProcessException as error:
            raise ClusterError(f"calibration failed: {error}") from error
    return Calibration(machine.describe(), _lines(points))


def _lines(points: Iterable[Point]) -> dict[str, Line]:
    by_line: dict[str, list[Any]] = {}
    for line, units, seconds in points:
        by_line.setdefault(line, []).append((units, seconds))
    return {line: fit(found) for line, found in by_line.items()}


def _rank(
    rank: int, machine: Machine, num_processes: int, store: str, only: tuple[str, ...], said: Any
) -> None:
    """One process: time every task together with the others; rank 0 hands over what they found."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's, with whom this process ends
    torch.set_num_threads(machine.threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes)
    alone = [dist.new_group([other]) for other in range(num_processes)][rank]
    clock = Clock.of(machine.device, machine.local_workers, machine.threads, os.cpu_count() or 1)
    tasks = dict(_tasks(alone, clock))
    chosen = [name for name in tasks if not only or name in only]
    for number, name in enumerate(chosen):
        works = rank == 0 or name == COLLECTIVES or machine.local_workers > 1
        torch.manual_seed(rank)
        dist.barrier()
        points = list(tasks[name]()) if works else []
        if machine.local_workers > 1:
            points = _mean(points, num_processes)
        if rank == 0:
            said.put(((number + 1) / len(chosen), points))
    dist.barrier()
    dist.destroy_process_group()


def _tasks(alone: Any, clock: Clock) -> Iterator[tuple[str, Task]]:
    for name in cases.planned_algorithms():
        yield f"select {name}", partial(cases.algorithm_points, name, clock)
    for kind, codes in cases.MESSAGES.items():
        for code in codes:
            yield f"{kind} {code}", partial(cases.message_points, kind, code, clock)
    for code in cases.CODES:
        yield f"quantise {code}", partial(cases.code_points, code, clock)
    yield "exchange", partial(cases.exchange_points, clock)
    yield "peer-topk", partial(cases.peer_points, clock)
    yield "hooks", partial(torch_hooks.hook_points, alone, clock)
    yield COLLECTIVES, partial(collective_points, clock)


def _mean(found: list[Point], num_ranks: int) -> list[Point]:
    """The points with the mean of all ranks' times.

    Of what takes long, ranks may have timed more or fewer points: those of all are kept.
    """
    everyone: list[Any] = [None] * num_ranks
    dist.all_gather_object(everyone, found)
    num_common = min(map(len, everyone))
    return [
        (line, units, fmean(theirs[n][2] for theirs in everyone))
        for n, (line, units, _) in enumerate(found[:num_common])
    ]


def collective_points(clock: Clock) -> Iterator[Point]:
    """Messages and bytes of gloo's collectives between the processes: what they cost without a network."""
    N = dist.get_world_size()
    for size in (_SMALL_BYTES, BUCKET_BYTES):
        vector, half = torch.zeros(size // 4), torch.zeros(size // 2, dtype=torch.float16)
        yield _collective(rounds.all_reduce(size, N), partial(dist.all_reduce, vector), clock)
        half_move = rounds.all_reduce(size, N, "all_reduce half")
        yield _collective(half_move, partial(dist.all_reduce, half), clock)
    for size in (_SMALL_BYTES, _MESSAGE_BYTES):
        vector, many = torch.zeros(size // 4), torch.zeros(N * (size // 4))
        yield _collective(rounds.broadcast(size, N), partial(dist.broadcast, vector, 0), clock)
        yield _collective(rounds.all_to_all(size, N), partial(_all_to_all, many), clock)
        yield _collective(rounds.all_gather(size, N), partial(_all_gather, many, vector), clock)


def _all_to_all(parts: Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(parts), parts)


def _all_gather(gathered: Tensor, own: Tensor) -> None:
    single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    single(gathered, own)


def _collective(move: rounds.Move, run: Callable[[], Any], clock: Clock) -> Point:
    """Many calls after one another, since processes come to a single one at different times."""
    num_calls = _NUM_CALLS if move.sent_bytes < BUCKET_BYTES else _NUM_CALLS // 6
    run()
    dist.barrier()
    start = clock.now()
    for _ in range(num_calls):
        run()
    seconds = (clock.now() - start) / num_calls
    units = {"messages": float(move.num_messages), "bytes": move.sent_bytes}
    return f"move {move.kind}", units, seconds
