"""What does a late rank cost the others, and does it help to exchange less often?

N processes on this machine take steps of a small network; a step's own time is a sleep, so that nothing but
lateness is measured. Either every rank is late at random (exponentially distributed), or one rank always is,
or that one makes fewer steps of a round by as much (its own `every`). `UpdateExchange` exchanges after every
H-th step. What is printed is the time per step over that of a rank which waits for nobody, the steps that all
ranks make per second, and what `summary()` says on a rank that is not late.

    python benchmarks/slow_rank.py [--json] [--out FILE] [--workers N] [--steps S] [--own-ms A] [--late-ms B]
"""

import argparse
import os
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from reporting import give, parser_for
from torch import nn

import regtopk

EVERY = (1, 2, 4, 8, 16)
KINDS = ("all at random", "one always", "one makes fewer")


def run_rank(rank: int, options: argparse.Namespace, store: str, queue: Any) -> None:
    """All cases on one rank, one after another."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    shared = dist.FileStore(store, options.workers)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=options.workers)
    for kind in KINDS:
        for every in EVERY:
            is_late = kind == "all at random" or rank == options.workers - 1
            found = train(every, options, kind, is_late=is_late)
            queue.put({"rank": rank, "late": kind, "every": every, **found})
    dist.barrier()
    dist.destroy_process_group()


def train(every: int, options: argparse.Namespace, kind: str, *, is_late: bool) -> dict[str, Any]:
    """Steps of which each takes its own time, and this rank longer if it is late."""
    torch.manual_seed(dist.get_rank())
    net = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    own_every = every
    if kind == "one makes fewer" and is_late:
        own_every = max(1, round(every * options.own_ms / (options.own_ms + options.late_ms)))
    topk = regtopk.TopK(density=0.01)
    exchange = regtopk.UpdateExchange(net, optimizer, topk, every=own_every, weight="steps")
    num_steps = options.steps // every * own_every
    lateness = torch.full((num_steps,), options.late_ms)
    if kind == "all at random":
        lateness = torch.empty(num_steps).exponential_(1 / options.late_ms)
    seconds = ((options.own_ms + lateness * is_late) / 1e3).tolist()
    start = time.perf_counter()
    for step_s in seconds:
        net(torch.randn(8, 64)).square().mean().backward()
        time.sleep(step_s)
        optimizer.step()
        optimizer.zero_grad()
    took = time.perf_counter() - start
    told = [line.strip() for line in exchange.summary().splitlines() if "kept the others" in line]
    exchange.close()
    return {"took_s": took, "own_s": sum(seconds), "steps": num_steps, "told": told[0] if told else ""}


def run(options: argparse.Namespace) -> dict[str, Any]:
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.spawn(
            run_rank, (options, f"{folder}/store", queue), nprocs=options.workers, join=False
        )
        assert processes is not None
        rows = [queue.get() for _ in range(len(KINDS) * len(EVERY) * options.workers)]
        while not processes.join():
            pass
    results = []
    for kind in KINDS:
        for every in EVERY:
            ranks = [row for row in rows if (row["late"], row["every"]) == (kind, every)]
            mean_own = sum(row["own_s"] for row in ranks) / len(ranks)
            slowest_own = max(row["own_s"] for row in ranks)
            took = max(row["took_s"] for row in ranks)
            told = next(row["told"] for row in ranks if row["rank"] == 0)
            results.append(
                {
                    "late": kind,
                    "every": every,
                    "over_mean": took / mean_own,
                    "over_slowest": took / slowest_own,
                    "steps_per_s": sum(row["steps"] for row in ranks) / took,
                    "told": told,
                }
            )
    return {
        "command": f"benchmarks/slow_rank.py --workers {options.workers} --steps {options.steps} "
        f"--own-ms {options.own_ms:g} --late-ms {options.late_ms:g}",
        "torch": torch.__version__,
        "results": results,
    }


def show(report: dict[str, Any]) -> None:
    print(report["command"])
    columns = f"{'time / a rank alone':>20}  {'time / slowest alone':>20}  {'steps per s':>11}"
    print(f"{'late':<15} {'every':>5}  {columns}  told")
    for row in report["results"]:
        print(
            f"{row['late']:<15} {row['every']:5}  {row['over_mean']:20.2f}  {row['over_slowest']:20.2f}  "
            f"{row['steps_per_s']:11.1f}  {row['told']}"
        )


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--workers", type=int, default=4, help="how many processes: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=64, help="of a rank that is not late, in every case: %(default)s"
    )
    parser.add_argument("--own-ms", type=float, default=40.0, help="how long a step takes: %(default)s ms")
    parser.add_argument(
        "--late-ms", type=float, default=40.0, help="how much longer on a late rank: %(default)s ms"
    )
    options = parser.parse_args()
    give(run(options), options, show)


if __name__ == "__main__":
    main()
