"""Real ranks on this machine, started and watched by torch's elastic launcher.

The launcher is a process of its own, so that records come back while it works. It ends its ranks, and then
itself, when its standard input closes: that happens however the caller ends, so nothing outlives it.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

from regtopk.errors import ClusterError
from regtopk.runs import Record

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

FAILURE = "failure"  # the key of the one record that is not a record
Entry = Callable[[Mapping[str, Any]], None]


def launch(entry: Entry, settings: Mapping[str, Any], num_workers: int) -> Generator[Record, None, None]:
    """Call an importable function with the settings on every rank, and yield what the ranks `emit`.

    The ranks end with the iteration: when all are done, when one fails, or when the caller stops asking.

    Args:
        entry: called with RANK, WORLD_SIZE and so on in the environment, as torchrun sets them.
        settings: what JSON can hold.
        num_workers: how many ranks.

    Raises:
        ClusterError: a rank failed; says which and how.
    """
    words = [f"{entry.__module__}:{entry.__qualname__}", json.dumps(settings), str(num_workers)]
    command = [sys.executable, "-c", f"from {__name__} import main; main()", *words]
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    launcher = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**loopback, **os.environ},
        start_new_session=True,  # Ctrl-C reaches the caller alone, which then closes our standard input
    )
    assert launcher.stdin is not None and launcher.stdout is not None
    failure = "the launcher of the ranks was stopped"
    try:
        for line in launcher.stdout:
            record: Record = json.loads(line)
            if FAILURE in record:
                failure = record[FAILURE]
            else:
                yield record
        if launcher.wait() != 0:
            raise ClusterError(failure)
    finally:
        launcher.stdin.close()
        launcher.wait()
        launcher.stdout.close()


def emit(record: Record) -> None:
    """Hand a record to the process that called `launch`."""
    sys.stdout.write(json.dumps(record) + "\n")  # in one piece: where nothing is buffered, print makes two,
    sys.stdout.flush()  # and another rank's may come between


def main() -> None:
    """The launcher process."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    logging.disable(logging.ERROR)  # what went wrong is said once, by the caller
    entry, settings, num_workers = sys.argv[1:]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(num_workers),
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        elastic_launch(config, call)(entry, settings)
    except ChildFailedError as error:
        emit({FAILURE: _describe(*error.get_first_failure())})
        sys.exit(1)
    except SignalException:
        sys.exit(1)


def call(entry: str, settings: str) -> None:
    """One rank: import the function and call it."""
    module, _, name = entry.partition(":")
    __import__(module)
    getattr(sys.modules[module], name)(json.loads(settings))


def _describe(rank: int, failure: "ProcessFailure") -> str:
    """Which rank failed and how: by an exception, with its traceback, or by a signal or exit code."""
    raised = failure.error_file_data.get("message")
    if not isinstance(raised, dict):
        return f"rank {rank} failed: {failure.message}"
    return f"rank {rank} failed: {raised['message']}\n{raised['extraInfo']['py_callstack']}".rstrip()


def _end_with_the_caller() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
