"""Real ranks for tests: N processes joined by gloo, started once, running one function after another."""

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
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
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.num_ranks:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                raise TimeoutError(f"only ranks {sorted(answers)} answered within {timeout_s} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                is_fine, answers[rank] = self._pipes[rank].recv()
                if not is_fine:  # the others may be waiting for this one: start anew
                    self.stop()
                    raise AssertionError(f"rank {rank}:\n{answers[rank]}")
        return [answers[rank] for rank in range(self.num_ranks)]

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
