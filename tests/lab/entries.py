"""What the ranks of test_launch.py do."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from regtopk.lab.launch import Emit, join_group


def fail(emit: Emit, how: str) -> None:
    join_group("gloo")
    if dist.get_rank() == 1 and how == "raise":
        raise ValueError("no luck here")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def listen(emit: Emit, word: str) -> None:
    """Emit the addresses that this rank listens on, once it has talked to the others, and sleep."""
    join_group("gloo")
    dist.all_reduce(torch.ones(1))
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    own = {os.readlink(fd) for fd in fds if os.path.lexists(fd)}
    tables = [Path(f"/proc/self/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables for line in table]
    is_listening = [s[3] == "0A" and f"socket:[{s[9]}]" in own for s in sockets]
    addresses = [s[1].partition(":")[0] for s, is_ours in zip(sockets, is_listening, strict=True) if is_ours]
    dist.barrier()
    emit({"rank": dist.get_rank(), "pid": os.getpid(), "addresses": addresses, "word": word})
    time.sleep(600)
