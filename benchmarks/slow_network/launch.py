"""One process a namespace, with the environment that torchrun makes for N nodes: as on N machines.

Rank 0 prints one JSON record a line, which come back here. A record {"ask": bandwidth} asks for links of that
bandwidth; the answer is a file, as all namespaces see the same file system.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.slow_network.links import Links
from benchmarks.slow_network.namespaces import INTERFACE, NetworkError

PORT = 29500
REPOSITORY = Path(__file__).resolve().parents[2]
Record = dict[str, Any]


def launch(module: str, job: Mapping[str, Any], links: Links) -> Generator[Record, None, None]:
    """Run a module on every rank, and yield what rank 0 records.

    Args:
        module: run on every rank; it is `joined()`.
        job: what JSON can hold.
        links: laid; shaped anew when the ranks ask for it.

    Raises:
        NetworkError: a rank failed; with the end of what it said.
    """
    with tempfile.TemporaryDirectory(prefix="slow-network-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        ranks = [_start(module, rank, folder, links) for rank in range(links.namespaces.num_workers)]
        try:
            num_asked = 0
            for record in _records(ranks, folder):
                if "ask" in record:
                    links.shape(record["ask"])
                    (folder / f"answer-{num_asked}").touch()
                    num_asked += 1
                else:
                    yield record
        finally:
            for process in ranks:
                process.terminate()
            for process in ranks:
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


def _start(module: str, rank: int, folder: Path, links: Links) -> "subprocess.Popen[str]":
    namespaces = links.namespaces
    place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(namespaces.num_workers)}
    master = {"MASTER_ADDR": namespaces.address(0), "MASTER_PORT": str(PORT)}
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")}
    surroundings = {
        **os.environ,
        **threads,
        **place,
        **master,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "SLOW_NETWORK_FOLDER": str(folder),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    with (folder / f"said-{rank}").open("w") as said:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespaces.workers[rank], sys.executable, "-m", module],
            env=surroundings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the ranks
        )


def _records(ranks: "list[subprocess.Popen[str]]", folder: Path) -> Generator[Record, None, None]:
    """What rank 0 prints, until all have ended; a rank that fails is reported as soon as it does."""
    lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for rank, process in enumerate(ranks):
        threading.Thread(target=_read, args=(rank, process, lines), daemon=True).start()
    num_running = len(ranks)
    while num_running:
        rank, line = lines.get()
        if line:
            yield json.loads(line)
            continue
        num_running -= 1
        if ranks[rank].wait() != 0:
            said = (folder / f"said-{rank}").read_text(encoding="utf-8", errors="replace")
            raise NetworkError(f"rank {rank} failed:\n{said[-4000:]}")


def _read(rank: int, process: "subprocess.Popen[str]", lines: "queue.SimpleQueue[tuple[int, str]]") -> None:
    """Every line a process prints, and an empty one at its end."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put((rank, line))
    lines.put((rank, ""))
