import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch.multiprocessing.spawn import start_processes

from regtopk.errors import ClusterError
from regtopk.lab.launch import launch
from tests.distributed.ranks import fork_process
from tests.lab import entries
from tests.processes import ended

PLAN = "plan --recalibrate --workers 2 --bandwidth 1G --step-time 1s --params 1M"


def wait_until_gone(pids: list[int], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"one of {pids} is still there"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("how", "reason"),
    [("raise", r"ValueError: no luck here\n(?s:.*)Traceback(?s:.*)entries.py"), ("kill", "ended by SIGKILL")],
)
def test_a_failing_rank_is_named(how: str, reason: str) -> None:
    with pytest.raises(ClusterError, match=rf"rank 1 failed: {reason}"):
        list(launch(entries.fail, 2, how))


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_loopback_alone_and_end_when_nobody_listens() -> None:
    records = launch(entries.listen, 2, "hello")
    heard = [next(records), next(records)]
    assert sorted(record["rank"] for record in heard) == [0, 1]
    addresses = [record["addresses"] for record in heard]
    assert all(addresses) and {address for of_rank in addresses for address in of_rank} == {"0100007F"}
    assert [record["word"] for record in heard] == ["hello"] * 2
    records.close()
    wait_until_gone([record["pid"] for record in heard])


def launch_forked(pipe: Connection) -> None:
    """Launch ranks that are forked from here, and tell their numbers."""

    def fork_processes(*args: Any, **options: Any) -> Any:
        return start_processes(*args, **{**options, "start_method": "fork"})

    with patch("regtopk.lab.launch.start_processes", fork_processes):
        for record in launch(entries.listen, 2, "hello"):
            pipe.send(record["pid"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_a_caller_that_is_killed_end() -> None:
    caller, pipe = fork_process(launch_forked)
    pids = [pipe.recv() for _ in range(2)]
    caller.kill()
    caller.join()
    wait_until_gone(pids)


def blocks_ctrl_c(pid: int) -> bool:
    _, _, signals = Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")
    return bool(int(signals.split()[0], 16) & 1 << signal.SIGINT - 1)


def test_ctrl_c_is_heard_again_where_no_rank_can_start() -> None:
    with pytest.raises(TypeError, match="pickle"):
        next(launch(entries.listen, 2, (word for word in "hello")))
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("sign", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_signal_to_a_command_and_its_ranks_ends_them(tmp_path: Path, sign: int, code: int) -> None:
    """These are spawned, as users' are, and import torch when it comes; Ctrl-C reaches all of them."""
    command = [sys.executable, "-m", "regtopk", *PLAN.split(), "--out", str(tmp_path / "out")]
    options: Any = {"env": {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, "start_new_session": True}
    with ended(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)) as caller:
        children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children")
        while len(pids := [int(pid) for pid in children.read_text().split()]) < 3:  # two ranks and a tracker
            assert caller.poll() is None
            time.sleep(0.05)
        assert all(map(blocks_ctrl_c, pids))
        os.killpg(caller.pid, sign)
        _, said = caller.communicate(timeout=60)
    assert caller.returncode == code
    assert all(line.startswith("regtopk: ") for line in said.splitlines())
    wait_until_gone(pids)
