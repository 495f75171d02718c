"""Real ranks for tests: N processes joined by gloo, started once, running one function after another."""

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


class Ranks:
    """N gloo processes that run any importable function on every rank."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """function(*args) on every rank; the results in rank order, or the first rank's failure."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout_s):
                self.stop()
                raise TimeoutError(f"rank {rank} gave no answer within {timeout_s} s")
            answers.append(pipe.recv())
        failed = [f"rank {rank}:\n{text}" for rank, (is_fine, text) in enumerate(answers) if not is_fine]
        if failed:
            self.stop()  # a rank that failed may have left the group out of step
            raise AssertionError("\n".join(failed))
        return [result for _, result in answers]

    def stop(self) -> None:
        """End all processes; the next run starts new ones."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        store = tempfile.mktemp(prefix="regtopk-store-")
        for rank in range(self.num_ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.num_ranks, store, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)


def _serve(rank: int, num_ranks: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
