"""Real ranks for tests: N processes joined by gloo or NCCL, started once, running function after function."""

import faulthandler
import io
import multiprocessing as mp
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from importlib import import_module
from inspect import Parameter, Signature, signature
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import free_port

NUM_STARTS = 3
_forks = mp.get_context("forkserver")  # imports torch once for all processes: each then starts in no time
_forks.set_forkserver_preload(["benchmarks.preloaded", "pytest"])


class Ranks:
    """N processes that run any importable function on every rank.

    Warnings are treated there as in the test that calls: by the filters of pyproject.toml and by its marks.

    Args:
        num_ranks: N.
        timeout_s: of the process group.
        backend: "nccl" has all ranks on one GPU, which NCCL takes for GPUs of different hosts.
    """

    def __init__(self, num_ranks: int, timeout_s: float = 200, backend: str = "gloo") -> None:
        self.num_ranks = num_ranks
        self._backend = backend
        self._timeout_s = timeout_s
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store = ""

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[Any]:
        """function(*args) on every rank; the results in rank order, or the first rank's failure."""
        return self.wait_for(self.start(function, *args), timeout_s=timeout_s)

    def run_script(self, script: Path, *words: str, timeout_s: float = 240) -> list[str]:
        """What a script prints on every rank, in a group of its own, as torchrun would start it.

        Without the seconds that torchrun and its ranks take to import torch. No other function may follow.
        """
        return self.run(_run_script, script, words, free_port(), timeout_s=timeout_s)

    def start(self, function: Callable[..., Any], *args: Any) -> list[int]:
        """Start function(*args) on every rank; the ranks to wait for."""
        if not self._processes:
            self._start_processes()
        for pipe in self._pipes:
            _send(pipe, (function, args, warnings.filters))
        return list(range(self.num_ranks))

    def wait_for(self, ranks: list[int], timeout_s: float = 240) -> list[Any]:
        """What these ranks answered, or the first failure."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < len(ranks):
            waiting = {self._pipes[rank]: rank for rank in ranks if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                where = "\n".join(self._where(rank) for rank in waiting.values())
                self.stop()
                answered = f"of ranks {ranks} only {sorted(answers)} answered within {timeout_s} s"
                raise TimeoutError(f"{answered}; the others are at\n{where}")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                is_fine, answers[rank] = _receive(self._pipes[rank])
                if not is_fine:  # the others may be waiting for this one: start anew
                    self.stop()
                    raise AssertionError(f"rank {rank}:\n{answers[rank]}")
        return [answers[rank] for rank in ranks]

    def _where(self, rank: int) -> str:
        """The stacks of a rank that hangs."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        return f"rank {rank}:\n{Path(f'{self._store}.{rank}').read_text()}"

    def kill(self, rank: int) -> None:
        """End one process at once, as a lost machine would."""
        self._processes[rank].kill()
        self._processes[rank].join()

    def stop(self) -> None:
        """End all processes; the next run starts new ones."""
        for rank in range(len(self._processes)):
            self.kill(rank)
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start_processes(self) -> None:
        """Start the ranks, and wait until all have met.

        gloo's ranks can miss one another where many tests open and close ports: they are then started again.
        """
        for _ in range(NUM_STARTS):
            self._fork()
            try:
                self.wait_for(list(range(self.num_ranks)))
                return
            except (AssertionError, OSError, EOFError) as error:  # a rank that has failed, or is gone
                self.stop()
                failure = error
        raise failure

    def _fork(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="regtopk-store-")
        self._store = f"{self._folder.name}/store"
        for rank in range(self.num_ranks):
            mine, theirs = _forks.Pipe()
            args = rank, self.num_ranks, self._store, self._timeout_s, self._backend, theirs
            process = _forks.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)


def on_ranks(num_ranks: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a test that every rank runs, 2 or 4 of them: what it asserts must hold on all."""
    fixture = {2: "two_ranks", 4: "four_ranks"}[num_ranks]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            given.pop(fixture).run(_run_test, function.__module__, function.__name__, given)

        own = signature(function).parameters.values()
        ranks = Parameter(fixture, Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("__name__", "__doc__", "__module__"):
            setattr(test, name, getattr(function, name))
        vars(test).update(__signature__=Signature([ranks, *own]), on_rank=function)
        return test

    return decorate


def _run_test(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(import_module(module), name).on_rank(**given)


def fork_process(function: Callable[..., Any], *args: Any) -> tuple[Any, Connection]:
    """Start function(pipe, *args) in a new process that has imported torch; the process, and the pipe."""
    mine, theirs = _forks.Pipe()
    process = _forks.Process(target=function, args=(theirs, *args), daemon=False)
    process.start()
    theirs.close()
    return process, mine


def _serve(rank: int, num_ranks: int, store: str, timeout_s: float, backend: str, pipe: Connection) -> None:
    stacks = Path(f"{store}.{rank}").open("w")  # noqa: SIM115 -- for as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
        torch.cuda.set_device(0)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    _send(pipe, (True, "here"))
    has_onednn = torch.backends.mkldnn.enabled
    while True:
        function, args, warnings.filters = _receive(pipe)
        # where a CPU has no bfloat16, Muon's products make torch give up oneDNN: others would get other bits
        torch.backends.mkldnn.set_flags(has_onednn, _fp32_precision=None)
        try:
            with warnings.catch_warnings():  # which takes note of the new filters
                answer = function(*args)
            _send(pipe, (True, answer))
        except BaseException:
            _send(pipe, (False, traceback.format_exc()))


def _run_script(script: Path, words: tuple[str, ...], port: int) -> str:
    rank, num_ranks = str(dist.get_rank()), str(dist.get_world_size())
    own = (rank, num_ranks) if dist.get_backend() == "gloo" else ("0", "1")  # NCCL's have a host each
    dist.destroy_process_group()
    os.environ |= {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": own[0], "LOCAL_WORLD_SIZE": own[1]}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
    os.chdir(script.parent)
    sys.argv = [str(script), *words]
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def _send(pipe: Connection, content: Any) -> None:
    pipe.send_bytes(pickle.dumps(content))  # not send: tensors would need room in /dev/shm, and open files


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())
