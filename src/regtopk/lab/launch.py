"""Real ranks on this machine: processes that meet through a file and talk over loopback.

No rank listens to other machines. Ranks end with their caller, however that ends.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from regtopk.errors import ClusterError
from regtopk.lab.runs import Record

Emit = Callable[[Record], None]


def launch(entry: Callable[..., None], num_workers: int, *args: Any) -> Generator[Record, None, None]:
    """Call an importable function on every rank, as entry(emit, *args), and yield what the ranks emit.

    The ranks end with the iteration: when all are done, when one fails, or when the caller stops asking.
    `entry` calls `join_group` first.
    """
    records = multiprocessing.get_context("spawn").SimpleQueue()
    ranks: Any = None
    with tempfile.TemporaryDirectory() as folder:
        of_rank = num_workers, os.path.join(folder, "store"), records, entry, args
        try:
            with _ctrl_c_waits():
                ranks = start_processes(
                    _run_rank, of_rank, num_workers, join=False, daemon=True, start_method="spawn"
                )
            is_done = False
            while not is_done:
                is_done = ranks.join(timeout=0.05)
                while not records.empty():
                    yield records.get()
        except ProcessRaisedException as error:
            *_, reason = str(error).strip().splitlines()
            raise ClusterError(f"rank {error.error_index} failed: {reason}\n{error}") from None
        except ProcessExitedException as error:
            how = f"ended by {error.signal_name}" if error.signal_name else f"exit code {error.exit_code}"
            raise ClusterError(f"rank {error.error_index} failed: {how}") from None
        finally:
            for process in ranks.processes if ranks else ():
                process.kill()
                process.join()


@contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Let Ctrl-C wait; processes that are started here never hear it, because their caller ends them."""
    pressed: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # the only one that may have handlers
    handler = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number)) if is_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
    if pressed:
        signal.raise_signal(signal.SIGINT)


def join_group(backend: str) -> None:
    """Initialise torch.distributed on a rank."""
    store = f"file://{os.environ['REGTOPK_STORE']}"
    rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=num_workers)


def _run_rank(rank: int, num_workers: int, store: str, records: Any, entry: Any, args: Any) -> None:
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_workers), "REGTOPK_STORE": store}
    os.environ.update({**loopback, **own})
    entry(records.put, *args)


def _end_with_the_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os.kill(os.getpid(), signal.SIGKILL)
