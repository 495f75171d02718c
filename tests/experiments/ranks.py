"""What the ranks of test_launch.py do."""

import html
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regtopk.experiments.launch import emit, join_group


def fail(settings: Mapping[str, Any]) -> None:
    join_group("gloo")
    if dist.get_rank() == settings["rank"]:
        raise ValueError("no luck here")
    dist.barrier()


def sleep(settings: Mapping[str, Any]) -> None:
    rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    emit({"rank": rank, "num_workers": num_workers, "pid": os.getpid(), **settings})
    time.sleep(600)


def die(settings: Mapping[str, Any]) -> None:
    join_group("gloo")
    if dist.get_rank() == settings["rank"]:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def listen(settings: Mapping[str, Any]) -> None:
    """Emit the addresses that this rank listens on, once it has talked to the others."""
    join_group("gloo")
    dist.all_reduce(torch.ones(1))
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_open(fd)}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in own and words[3] == "0A":  # LISTEN
                emit({"address": words[1].partition(":")[0], "html": html.__file__})
    dist.barrier()
    dist.destroy_process_group()


def is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
