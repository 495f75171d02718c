"""One process for each rank, in its namespace if it has one, as on N machines.

Rank 0 prints one JSON record a line, which come back here. A record {"ask": bandwidth} asks for links of that
bandwidth; the answer is a file, as all ranks see the same file system. They meet in a file there too.
"""

import ctypes
import importlib
import json
import multiprocessing as mp
import os
import queue
import tempfile
import threading
from collections.abc import Generator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.slow_network.links import Links
from benchmarks.slow_network.namespaces import NetworkError

NAMESPACES = "/run/netns"  # where `ip netns` keeps them
NETWORK = 0x40000000  # CLONE_NEWNET
Record = dict[str, Any]
_forks: Any = mp.get_context("forkserver")  # imports torch once for all ranks
_forks.set_forkserver_preload(["benchmarks.preloaded"])


class Started(NamedTuple):
    """A rank: its process, and the end of what it prints."""

    process: Any
    printed: Connection


def launch(module: str, job: Mapping[str, Any], links: Links) -> Generator[Record, None, None]:
    """Run a module's `main` on every rank, and yield what rank 0 records.

    Args:
        module: whose `main` is `joined()`.
        job: what JSON can hold.
        links: laid; shaped anew when the ranks ask for it.

    Raises:
        NetworkError: a rank failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory(prefix="slow-network-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        ranks: list[Started] = []
        try:
            for rank in range(links.num_workers):
                ranks.append(_start(module, rank, folder, links))
            num_asked = 0
            for record in _records(ranks, folder):
                if "ask" in record:
                    links.shape(record["ask"])
                    (folder / f"answer-{num_asked}").touch()
                    num_asked += 1
                else:
                    yield record
        finally:
            for process, _ in ranks:
                process.terminate()
            for process, printed in ranks:
                process.join()
                printed.close()


def _start(module: str, rank: int, folder: Path, links: Links) -> Started:
    place = {"RANK": str(rank), "WORLD_SIZE": str(links.num_workers), "SLOW_NETWORK_FOLDER": str(folder)}
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
    surroundings = {**threads, **place, **links.surroundings(rank)}
    printed, theirs = _forks.Pipe(duplex=False)
    args = module, links.namespace(rank), surroundings, folder / f"said-{rank}", theirs
    process = _forks.Process(target=_run_rank, args=args, daemon=True)
    process.start()
    theirs.close()
    return Started(process, printed)


def _run_rank(
    module: str, namespace: str | None, surroundings: dict[str, str], said: Path, printed: Connection
) -> None:
    """A rank's whole life, in its namespace if it has one; its caller reads what it prints and says."""
    os.setsid()  # Ctrl-C reaches the caller alone, which then ends the ranks
    if not said.parent.exists():
        return  # the caller was interrupted before it knew of this rank
    os.dup2(printed.fileno(), 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    if namespace is not None:
        _enter(namespace)
    os.environ |= surroundings
    importlib.import_module(module).main()


def _enter(namespace: str) -> None:
    """Join a network namespace, as `ip netns exec` does; this process must have one thread alone."""
    here = os.open(f"{NAMESPACES}/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(here, NETWORK) != 0:
        raise OSError(ctypes.get_errno(), f"namespace {namespace} cannot be joined")
    os.close(here)


def _records(ranks: list[Started], folder: Path) -> Generator[Record, None, None]:
    """What rank 0 prints, until all have ended; a rank that fails is reported as soon as it does."""
    lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for number, (_, printed) in enumerate(ranks):
        threading.Thread(target=_read, args=(number, printed.fileno(), lines), daemon=True).start()
    num_running = len(ranks)
    while num_running:
        number, line = lines.get()
        if line:
            yield json.loads(line)
            continue
        num_running -= 1
        process = ranks[number].process
        process.join()
        if process.exitcode != 0:
            said = (folder / f"said-{number}").read_text(encoding="utf-8", errors="replace")
            raise NetworkError(f"rank {number} failed:\n{said[-4000:]}")


def _read(rank: int, printed: int, lines: "queue.SimpleQueue[tuple[int, str]]") -> None:
    """Every line a process prints, and an empty one at its end."""
    with open(os.dup(printed), encoding="utf-8") as text:
        for line in text:
            lines.put((rank, line))
    lines.put((rank, ""))
