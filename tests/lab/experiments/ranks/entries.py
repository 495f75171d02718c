"""What the ranks of test_launch.py do."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from regtopk.lab.experiments.ranks.launch import Emit, join_group


def fail(emit: Emit, rank: int) -> None:
    join_group("gloo")
    if dist.get_rank() == rank:
        raise ValueError("no luck here")
    dist.barrier()


def die(emit: Emit, rank: int) -> None:
    join_group("gloo")
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(emit: Emit) -> None:
    emit({"pid": os.getpid()})
    time.sleep(600)


def listen(emit: Emit, word: str) -> None:
    """Emit the addresses that this rank listens on, once it has talked to the others, and sleep."""
    join_group("gloo")
    dist.all_reduce(torch.ones(1))
    addresses = []
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd)}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in own and words[3] == "0A":  # LISTEN
                addresses.append(words[1].partition(":")[0])
    dist.barrier()
    emit({"rank": dist.get_rank(), "pid": os.getpid(), "addresses": addresses, "word": word})
    time.sleep(600)


def is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
