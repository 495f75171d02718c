"""Does a long run stay as it was: memory, threads, open files, equal parameters, nothing lost or invented?

Two processes, joined by gloo over loopback, train a small network by gradients for 20,000 steps, with Top-k
in 4 bits, and save a checkpoint in the background every 500. Ten times on the way each looks at its resident
memory, threads and file descriptors. Over all steps the law must hold:

    sum_t sum_n w_n g_n = sum_t aggregate + sum_n w_n e_n

The sums are kept in float64, so what is missing was lost in float32's rounding. That may grow with the number
of steps, but no faster: each rounds numbers no larger than those that were seen.

    python -m benchmarks.soak [--steps 20000] [--workers 2] [--out FILE]
"""

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

import regtopk

LOOKS = 10
EPSILON = 2.0**-24  # of rounding to float32


def resources() -> dict[str, int]:
    """What this process holds; of memory the most so far where there is no /proc."""
    process = Path("/proc/self")
    if not process.exists():
        return {"rss_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    words = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return {
        "rss_kb": int(words["VmRSS"].split()[0]),
        "threads": int(words["Threads"]),
        "files": len(os.listdir(process / "fd")),
    }


def batch(step: int, rank: int, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and the class that a fixed linear map gives them."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, (x @ teacher).argmax(-1)


def soak(num_steps: int, save_every: int, folder: Path) -> dict[str, Any]:
    """Train on this rank of a process group; what was seen."""
    torch.manual_seed(0)
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    teacher = torch.randn(32, 10, generator=torch.Generator().manual_seed(0))
    exchange = regtopk.Exchange(model, regtopk.TopK(density=0.02, value_code="4bit"))
    given = aggregates = torch.zeros(0)
    bound, looks, begun = 0.0, [], time.perf_counter()
    with regtopk.Checkpoints(folder, asynchronous=True) as checkpoints:
        for step in range(1, num_steps + 1):
            x, y = batch(step, rank, teacher)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            before = _gradient(model)
            exchange.step()
            after = _gradient(model)
            given = before if step == 1 else given + before
            aggregates = after if step == 1 else aggregates + after
            optimizer.step()
            # a step rounds the accumulated vector, what is left of it, and the sum of what was sent
            held = before.abs().max() + _residual(exchange).abs().max()
            bound += 3 * EPSILON * float(torch.maximum(held, after.abs().max()))
            if step % max(num_steps // LOOKS, 1) == 0:
                looks.append({"step": step, **resources()})
            if step % save_every == 0:
                checkpoints.save(step, model=model, optimizer=optimizer, exchange=exchange)
    owed = (given - _residual(exchange)) / num_workers
    dist.all_reduce(owed)
    largest_bound = torch.tensor(bound, dtype=torch.float64)
    dist.all_reduce(largest_bound, op=dist.ReduceOp.MAX)
    parameters = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyones = [torch.empty_like(parameters) for _ in range(num_workers)]
    dist.all_gather(everyones, parameters)
    exchange.close()
    return {
        "looks": looks,
        "are_parameters_equal": all(torch.equal(theirs, parameters) for theirs in everyones),
        "law_error": float((owed - aggregates).abs().max()),
        "law_bound": float(largest_bound),
        "checkpoints": sorted(path.name.rpartition("-")[0] for path in folder.glob("step-*")),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def _residual(exchange: regtopk.Exchange) -> Tensor:
    """What this rank has not sent yet, in the order of the parameters."""
    entries = exchange.state_dict()["workers"][str(exchange.rank)]["entries"]
    return torch.cat([parts["residual"].flatten() for parts in entries.values()]).double()


def _run(rank: int, num_workers: int, store: str, num_steps: int, save_every: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_workers)
    seen = soak(num_steps, save_every, Path(folder) / "checkpoints")
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        args = (arguments.workers, store, arguments.steps, arguments.save_every, folder)
        start_processes(_run, args, nprocs=arguments.workers, start_method="spawn")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(arguments.workers)]
    results = {
        "steps": arguments.steps,
        "workers": arguments.workers,
        "save_every": arguments.save_every,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "ranks": ranks,
    }
    print(json.dumps(results, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
