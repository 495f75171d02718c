"""What the ranks of test_launch.py do."""

import os
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from regtopk.experiments.launch import emit


def fail(settings: Mapping[str, Any]) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == settings["rank"]:
        raise ValueError("no luck here")
    dist.barrier()


def sleep(settings: Mapping[str, Any]) -> None:
    rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    emit({"rank": rank, "num_workers": num_workers, "pid": os.getpid(), **settings})
    time.sleep(600)
