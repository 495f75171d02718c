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

from regtopk.lab.experiments.ranks.launch import emit, join_group


def fail(settings: Mapping[str, Any]) -> None:
    join_group("gloo")
    if dist.get_rank() == settings["rank"]:
        raise ValueError("no luck here")
    dist.barrier()


def sleep(settings: Mapping[str, Any]) -> None:
    emit({**_own(), **settings})
    time.sleep(600)


def die(settings: Mapping[str, Any]) -> None:
    join_group("gloo")
    if dist.get_rank() == settings["rank"]:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def listen(settings: Mapping[str, Any]) -> None:
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
    emit({**_own(), "addresses": addresses, "html": html.__file__, **settings})
    time.sleep(600)


def is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def _own() -> dict[str, int]:
    return {"rank": int(os.environ["RANK"]), "num_workers": int(os.environ["WORLD_SIZE"]), "pid": os.getpid()}
