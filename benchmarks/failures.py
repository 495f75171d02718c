"""Ranks that are killed: do runs come back, with the same bits, and what is lost?

Every part runs under torch's elastic agent, as torchrun does, on this machine. Processes are forked from one
that has imported torch, so that a restart takes a second.

    kills     examples/train_elastic.py on four ranks, one of which is killed (SIGKILL) at a random moment.
              Does the run end, with the bits of an undisturbed one? How many steps are made again?
              kills-delay and kills-returned are the same with updates: with those that travel while a step
              computes, and with sums that come back in part
    writing   two ranks that do nothing but write checkpoints and are killed again and again: does every start
              find a whole state?
    resize    4 -> 3 -> 4 ranks: is sum_n w_n e_n conserved at each change, and where does the loss end?
    machines  two agents of two ranks (--nnodes 1:2); one agent is killed with its ranks, and comes back

    python -m benchmarks.failures kills|kills-delay|kills-returned|writing|resize|machines
                                  [--times N] [--seed S] [--out FILE]
"""

import argparse
import contextlib
import importlib
import io
import json
import multiprocessing as mp
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import regtopk
from regtopk.distributed.checkpoints.choice import found_in
from regtopk.distributed.checkpoints.files import saves_in

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_elastic.py"
STEPS, SAVE_EVERY = 40, 5
TIMEOUT_S = 300.0  # a run that takes longer has not come back
_forks = mp.get_context("forkserver")
_PRELOADED = "benchmarks.preloaded"
Rank = Callable[..., None]


# Ranks.


def example(folder: str, *words: str) -> None:
    """A rank of the example, which also writes down who it is, its steps, and where it goes on from."""
    rank, num_ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    _begin_rank()
    script = runpy.run_path(str(EXAMPLE))
    _watch(script["Batches"], Path(folder), rank, num_ranks)
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    sys.argv = ["train_elastic.py", "--checkpoints", f"{folder}/checkpoints", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        script["main"]()
    Path(folder, f"printed-{rank}").write_text(printed.getvalue())


def _begin_rank() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has its agent's handlers
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)


def _watch(batches: Any, folder: Path, rank: int, num_ranks: int) -> None:
    take_next, load = batches.next, regtopk.Checkpoints.load

    def counted_next(self: Any, *args: int) -> Tensor:
        share: Tensor = take_next(self, *args)
        num_steps = self.epoch * (self.num_samples // self.size) + self.place // self.size
        written = folder / f"step-of-{rank}.new"  # a file that is written over is empty for a while
        written.write_text(str(num_steps))
        written.replace(folder / f"step-of-{rank}")
        return share

    def written_load(self: regtopk.Checkpoints, **things: Any) -> dict[str, Any] | None:
        extra = load(self, **things)
        exchange, step = things["exchange"], 0 if extra is None else extra["step"]
        part = weighted_residual({"rank-0.pt": {"exchange": exchange.state_dict()}})
        torch.save(part, folder / f"loaded-{step}-{rank}.pt")
        with (folder / f"starts-{rank}").open("a") as starts:
            starts.write(f"{num_ranks} {step}\n")
        return extra

    batches.next, regtopk.Checkpoints.load = counted_next, written_load  # type: ignore[method-assign]


def write_for_ever(folder: str) -> None:
    """A rank that saves until it is killed; every state it saves and loads must be of one moment."""
    rank = os.environ["RANK"]
    _begin_rank()
    dist.init_process_group("gloo")
    model = nn.Linear(300, 300)
    exchange = regtopk.Exchange(model, regtopk.TopK(k=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
    checkpoints = regtopk.Checkpoints(f"{folder}/checkpoints")
    loaded = checkpoints.load(model=model, optimizer=optimizer, exchange=exchange)
    step = 0 if loaded is None else loaded["step"]
    if step:
        residual = exchange.state_dict()["workers"][rank]["entries"]["weight"]["residual"]
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        assert loaded is not None and loaded["mine"] == [step, int(rank)], (step, rank, loaded)
        assert exchange.num_steps == step and bool((model.weight == step).all() and (momentum == step).all())
        assert residual.abs().max() > 0
    with Path(folder, f"starts-{rank}").open("a") as starts:
        starts.write(f"{dist.get_world_size()} {step}\n")
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    while not _is_any(Path(folder, "stop").exists()):
        step += 1
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        exchange.step()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(step)
                optimizer.state[p]["momentum_buffer"].fill_(step)
        checkpoints.save(step, model=model, optimizer=optimizer, exchange=exchange, mine=[step, int(rank)])
    checkpoints.close()
    dist.destroy_process_group()


def _is_any(here: bool) -> bool:
    """Whether it is so on any rank: they end together."""
    number = torch.tensor(int(here))
    dist.all_reduce(number, op=dist.ReduceOp.MAX)
    return bool(number)


# Machines: an agent and its ranks.


def machine(ranks: Rank, args: tuple[str, ...], num_ranks: int, nodes: tuple[int, int], port: int) -> None:
    """What torchrun does, in this process; its ranks are forked from it."""
    os.setsid()
    importlib.import_module(_PRELOADED)  # before ranks are forked: each would import it by itself
    threading.Thread(target=_end_with_the_caller, args=(os.getppid(),), daemon=True).start()
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    config = LaunchConfig(
        min_nodes=nodes[0],
        max_nodes=nodes[1],
        nproc_per_node=num_ranks,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        rdzv_configs={"last_call_timeout": 3, "keep_alive_interval": 1},
        run_id="failures",
        max_restarts=1000,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, ranks)(*args)


def _end_with_the_caller(parent: int) -> None:
    """However the caller ends: ranks that write for ever must not outlive it."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


@contextmanager
def started(
    ranks: Rank, *args: str, num_ranks: int, nodes: tuple[int, int] = (1, 1), port: int | None = None
) -> Iterator[Any]:
    """A machine that runs these ranks; it ends with the block, and all its processes."""
    port = free_port() if port is None else port
    process = _forks.Process(target=machine, args=(ranks, args, num_ranks, nodes, port))
    process.start()
    try:
        yield process
    finally:
        end(process)


def end(process: Any) -> None:
    """Kill a machine: its agent, and the session of its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def wait_for(what: str, is_there: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + timeout_s
    while not (answer := is_there()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {timeout_s} s")
        time.sleep(0.01)
    return answer


def run_example(folder: Path, num_ranks: int, *words: str) -> None:
    """An undisturbed run."""
    folder.mkdir(parents=True, exist_ok=True)
    with started(example, str(folder), *words, num_ranks=num_ranks) as process:
        process.join(TIMEOUT_S)
        if process.exitcode != 0:
            raise RuntimeError(f"the run ended with {process.exitcode}")


# What checkpoints hold.


def last_state(folder: Path) -> tuple[int, dict[str, Any]]:
    """The newest checkpoint: its step, and the contents of its files, without times."""
    save = max(saves_in(folder / "checkpoints"))
    files = {
        path.name: torch.load(path, weights_only=True)
        for path in sorted((folder / "checkpoints" / save.folder).glob("*.pt"))
    }
    for content in files.values():
        for worker in content.get("exchange", {"workers": {}})["workers"].values():
            worker["total"] = {key: n for key, n in worker["total"].items() if not key.endswith("_s")}
    return save.step, files


def same(left: Any, right: Any) -> bool:
    """Whether two states are equal, tensors bit for bit."""
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def weighted_residual(files: dict[str, Any]) -> Tensor:
    """sum_n w_n e_n, in float64."""
    states = [content["exchange"] for name, content in files.items() if name.startswith("rank-")]
    total = torch.zeros((), dtype=torch.float64)
    for state in states:
        for rank, worker in state["workers"].items():
            flat = torch.cat([parts["residual"].flatten() for parts in worker["entries"].values()])
            total = total + state["weights"][int(rank)] * flat.double()
    return total


# Parts.


def kills(times: int, chance: random.Random, folder: Path, more: str = "") -> dict[str, Any]:
    words = ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY), *more.split()]
    run_example(folder / "undisturbed", 4, *words)
    _, expected = last_state(folder / "undisturbed")
    runs = []
    for number in range(times):
        runs.append(_killed_once(folder / str(number), words, expected, chance))
        print(json.dumps(runs[-1]), flush=True)
    return {
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        "ended": sum(run["has_ended"] for run in runs),
        "same_bits": sum(run["has_same_bits"] for run in runs),
        "most_steps_made_again": max(run["killed_at"] - run["went_on_from"] for run in runs),
        "runs": runs,
    }


def _killed_once(here: Path, words: list[str], expected: Any, chance: random.Random) -> dict[str, Any]:
    rank, kill_at, begun = chance.randrange(4), chance.randrange(1, STEPS), time.monotonic()
    here.mkdir()
    with started(example, str(here), *words, num_ranks=4) as process:
        wait_for("step", lambda: number_in(here / f"step-of-{rank}") >= kill_at)
        time.sleep(chance.random() * 0.02)
        steps = [number_in(here / f"step-of-{n}") for n in range(4)]
        os.kill(number_in(here / f"pid-{rank}"), signal.SIGKILL)
        steps += [number_in(here / f"step-of-{n}") for n in range(4)]  # unless all have started anew already
        killed_at = max(steps)
        process.join(TIMEOUT_S)
        has_ended = process.exitcode == 0
    starts = starts_of(here, 0)
    return {
        "rank": rank,
        "killed_at": killed_at,
        "went_on_from": starts[-1][1],
        "num_starts": len(starts),
        "has_ended": has_ended,
        "has_same_bits": has_ended and same(last_state(here)[1], expected),
        "seconds": round(time.monotonic() - begun, 1),
    }


def writing(times: int, chance: random.Random, folder: Path) -> dict[str, Any]:
    def num_starts() -> int:
        return min(len(starts_of(folder, rank)) for rank in range(2))

    def newest() -> Any:
        return max(saves_in(folder / "checkpoints"), default=None)

    with started(write_for_ever, str(folder), num_ranks=2) as process:
        for number in range(times):
            wait_for("start", partial(lambda so_far: num_starts() > so_far, number))
            wait_for("save", partial(lambda at_start: newest() != at_start, newest()))
            time.sleep(chance.random() * 0.5)  # a save takes a part of this
            os.kill(number_in(folder / f"pid-{chance.randrange(2)}"), signal.SIGKILL)
        wait_for("last start", lambda: num_starts() > times)
        (folder / "stop").touch()
        process.join(TIMEOUT_S)
        has_ended = process.exitcode == 0
    starts = [[step for _, step in starts_of(folder, rank)] for rank in range(2)]
    return {
        "kills": times,
        "has_ended": has_ended,
        "do_ranks_start_alike": starts[0] == starts[1],
        "is_never_back": starts[0] == sorted(starts[0]),
        "starts": starts[0],
    }


def resize(times: int, chance: random.Random, folder: Path) -> dict[str, Any]:
    seeds = []
    for seed in range(times):
        here = folder / str(seed)
        words = ["--seed", str(seed), "--save-every", "20", "--steps"]
        run_example(here / "undisturbed", 4, *words, "220")
        changes: list[dict[str, float]] = []
        for num_ranks, steps in ((4, 60), (3, 140), (4, 220)):
            before = weighted_residual(last_state(here / "changed")[1]) if changes else None
            run_example(here / "changed", num_ranks, *words, str(steps))
            changes.append({"ranks": num_ranks, "until_step": steps})
            if before is not None:
                changes[-1]["error"] = _error(before, here / "changed", num_ranks)
        losses = [_loss(here / name / "printed-0") for name in ("undisturbed", "changed")]
        seeds.append({"seed": seed, "losses": losses, "ratio": losses[1] / losses[0], "changes": changes})
        print(json.dumps(seeds[-1]), flush=True)
    return {"seeds": seeds}


def _error(before: Tensor, folder: Path, num_ranks: int) -> float:
    """How far sum_n w_n e_n is from what was saved, after the last start; of its largest entry."""
    _, step = starts_of(folder, 0)[-1]
    parts = [torch.load(folder / f"loaded-{step}-{rank}.pt", weights_only=True) for rank in range(num_ranks)]
    total = torch.stack(parts).sum(0)
    return float((total - before).abs().max() / before.abs().max())


def machines(times: int, chance: random.Random, folder: Path) -> dict[str, Any]:
    words = ["--steps", "200", "--save-every", "10"]
    where: dict[str, Any] = {"num_ranks": 2, "nodes": (1, 2), "port": free_port()}

    def runs_on(num_ranks: int, start: int) -> bool:
        """Whether this many ranks have saved a whole checkpoint since a start."""
        starts = starts_of(folder, 0)[start:]
        if not starts or starts[-1][0] != num_ranks:
            return False
        saves = found_in(folder / "checkpoints").items()
        return any(save.step > starts[-1][1] and len(found.parts) == num_ranks for save, found in saves)

    with started(example, str(folder), *words, **where) as first:
        with started(example, str(folder), *words, **where):
            wait_for("run on 4 ranks", lambda: runs_on(4, 0))
            num_starts = len(starts_of(folder, 0))
        wait_for("run on 2 ranks", lambda: runs_on(2, num_starts))
        num_starts = len(starts_of(folder, 0))
        with started(example, str(folder), *words, **where):
            wait_for("run on 4 ranks again", lambda: runs_on(4, num_starts))
            first.join(TIMEOUT_S)
        has_ended = first.exitcode == 0
    step, _ = last_state(folder)
    return {"has_ended": has_ended, "starts": starts_of(folder, 0), "last_step": step}


def number_in(path: Path) -> int:
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0


def starts_of(folder: Path, rank: int) -> list[tuple[int, int]]:
    """On how many ranks, and from which step, each start of a rank went on."""
    path = folder / f"starts-{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    pairs = [line.split() for line in lines if line.endswith("\n")]
    return [(int(num_ranks), int(step)) for num_ranks, step in pairs]


def _loss(path: Path) -> float:
    return float(path.read_text().partition("training loss ")[2].split()[0])


PARTS: dict[str, tuple[Callable[..., dict[str, Any]], int]] = {
    "kills": (kills, 20),
    "kills-delay": (partial(kills, more="--updates --delay 1"), 20),
    "kills-returned": (partial(kills, more="--updates --returned 0.01"), 20),
    "writing": (writing, 50),
    "resize": (resize, 3),
    "machines": (machines, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--times", type=int, help="how often; the seeds of resize")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    part, times = PARTS[arguments.part]
    _forks.set_forkserver_preload([_PRELOADED])
    with tempfile.TemporaryDirectory(prefix="regtopk-failures-") as folder:
        found = part(arguments.times or times, random.Random(arguments.seed), Path(folder))
    results = {"part": arguments.part, "torch": torch.__version__, "seed": arguments.seed, **found}
    print(json.dumps(results, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
