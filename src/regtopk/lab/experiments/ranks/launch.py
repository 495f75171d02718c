"""Real ranks on this machine: processes that meet through a file and talk over loopback.

No rank listens to other machines, and none imports from the current folder. A rank ends when its standard
input closes: that happens however the caller ends, so nothing outlives it.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch.distributed as dist

from regtopk.errors import ClusterError
from regtopk.lab.runs import Record

Entry = Callable[[Mapping[str, Any]], None]
FAILURE = "failure"  # the key of the one record that is not a record
KILLED_WITHIN_S = 2.0  # a killed rank is gone so long after the others notice, at the latest
STORE = "REGTOPK_STORE"  # names the file through which the ranks meet
# the paths come first: Python would look for modules where it is started
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    f"from {__name__} import run_rank; run_rank(*sys.argv[2:])"
)


def launch(entry: Entry, settings: Mapping[str, Any], num_workers: int) -> Generator[Record, None, None]:
    """Call an importable function with the settings on every rank, and yield what the ranks `emit`.

    The ranks end with the iteration: when all are done, when one fails, or when the caller stops asking.

    Args:
        entry: what a rank does; it calls `join_group` first.
        settings: what JSON can hold.
        num_workers: how many ranks.

    Raises:
        ClusterError: a rank failed; says which and how.
    """
    lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_start(entry, settings, rank, num_workers, folder) for rank in range(num_workers)]
        for rank, process in enumerate(ranks):
            threading.Thread(target=_listen, args=(rank, process, lines), daemon=True).start()
        try:
            num_done = 0
            while num_done < num_workers:
                rank, line = lines.get()
                if line:
                    record: Record = json.loads(line)
                    if FAILURE in record:
                        raise ClusterError(_first_failure(ranks, rank, record[FAILURE]))
                    yield record
                elif ranks[rank].wait() == 0:
                    num_done += 1
                else:
                    raise ClusterError(_first_failure(ranks, rank, f"exit code {ranks[rank].returncode}"))
        finally:
            for process in ranks:
                _end(process)


def emit(record: Record) -> None:
    """Hand a record to the process that called `launch`."""
    sys.stdout.write(json.dumps(record) + "\n")  # in one piece: where nothing is buffered, print makes two
    sys.stdout.flush()


def join_group(backend: str) -> None:
    """Initialise torch.distributed on a rank."""
    rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ[STORE], num_workers)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_workers)


def run_rank(entry: str, settings: str) -> None:
    """One rank: import the function and call it; what it raises is handed to the caller."""
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    module, _, name = entry.partition(":")
    try:
        __import__(module)
        getattr(sys.modules[module], name)(json.loads(settings))
    except Exception as error:
        emit({FAILURE: f"{type(error).__name__}: {error}\n{traceback.format_exc()}".rstrip()})
        sys.exit(1)


def _start(
    entry: Entry, settings: Mapping[str, Any], rank: int, num_workers: int, folder: str
) -> subprocess.Popen[str]:
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": num_workers,
        STORE: os.path.join(folder, "store"),
    }
    name = f"{entry.__module__}:{entry.__qualname__}"
    return subprocess.Popen(
        [sys.executable, "-c", START, json.dumps(_paths()), name, json.dumps(settings)],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **loopback, **{key: str(value) for key, value in place.items()}},
        start_new_session=True,  # Ctrl-C reaches the caller alone, which then closes our standard input
    )


def _paths() -> list[str]:
    """Where this process looks for modules, without the current folder unless PYTHONPATH names it."""
    named = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [os.path.abspath(path) for path in sys.path]
    return [path for path in paths if path != os.getcwd() or path in named]


def _listen(rank: int, process: subprocess.Popen[str], lines: "queue.SimpleQueue[tuple[int, str]]") -> None:
    """Hand on what a rank writes, and an empty line at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put((rank, line))
    lines.put((rank, ""))


def _first_failure(ranks: list[subprocess.Popen[str]], rank: int, reason: str) -> str:
    """Which rank failed and how; one that was killed comes first, since it makes the others fail."""
    deadline = time.monotonic() + KILLED_WITHIN_S
    while True:
        codes = [process.poll() for process in ranks]
        for number, code in enumerate(codes):
            if code is not None and code < 0:
                return f"rank {number} failed: ended by {signal.Signals(-code).name}"
        if None not in codes or time.monotonic() > deadline:
            return f"rank {rank} failed: {reason}"
        time.sleep(0.05)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait()
    process.stdout.close()


def _end_with_the_caller() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
