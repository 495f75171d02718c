"""Does a long run stay as it was: memory, threads, open files, equal parameters, nothing lost or invented?

Two processes, joined by gloo over loopback, train a small network by gradients for 20,000 steps, with Top-k
in 4 bits, and save a checkpoint in the background every 500. Ten times on the way each looks at its resident
memory, threads and file descriptors. Over all steps the law must hold, g_n being what goes in, a gradient or
with --updates what the optimizer changed:

    sum_t sum_n w_n g_n = sum_t aggregate + sum_n w_n e_n

The sums are kept in float64, so what is missing was lost in float32's rounding. That may grow with the number
of steps, but no faster: each rounds numbers no larger than those that were seen.

    python -m benchmarks.soak [--updates] [--steps 20000] [--workers 2] [--out FILE]
"""

import argparse
import gc
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


class Gradients:
    """Top-k of gradients, and the sums of what went into it and came out of it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.exchange = regtopk.Exchange(model, regtopk.TopK(density=0.02, value_code="4bit"))
        self.saved = {"model": model, "optimizer": self.optimizer, "exchange": self.exchange}
        self.given = self.aggregates = torch.zeros((), dtype=torch.float64)
        self.bound = 0.0

    def step(self) -> None:
        """A step rounds the accumulated vector, what is left of it, and the sum of what was sent."""
        before = _gradient(self.model)
        self.exchange.step()
        after = _gradient(self.model)
        self.given, self.aggregates = self.given + before, self.aggregates + after
        self.optimizer.step()
        held = before.abs().max() + _residual(self.exchange).abs().max()
        self.bound += 3 * EPSILON * float(torch.maximum(held, after.abs().max()))

    def finish(self) -> None:
        """All is sent that will be."""


class Updates:
    """The same of AdamW's updates, of one half of the model every second step, which travel for a step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.given = self._before = torch.zeros((), dtype=torch.float64)
        self.bound = 0.0
        # these come before the exchange's own hook, which moves the parameters too
        self.optimizer.register_step_pre_hook(self._look)
        self.optimizer.register_step_post_hook(self._count)
        topk = regtopk.TopK(density=0.02, value_code="4bit")
        self.exchange = regtopk.UpdateExchange(model, self.optimizer, topk, every=4, fragments=2, delay=1)
        self.saved = {"exchange": self.exchange}
        self._start = _parameters(model)

    @property
    def aggregates(self) -> Tensor:
        return self._start - _parameters(self.model)

    def step(self) -> None:
        """Six roundings per exchange: the update, what is accumulated and left, the sum, both parameters."""
        self.optimizer.step()
        if (
            self.exchange.num_steps % 2
        ):  # an exchange has come back; to ask while it travels would wait for it
            self._bound_exchange()

    def finish(self) -> None:
        """Give all ranks the same parameters, by an exchange of both halves."""
        self.exchange.finish()
        self._bound_exchange()

    def _bound_exchange(self) -> None:
        held = 2 * float(_parameters(self.model).abs().max()) + self.exchange.total.residual_norm
        self.bound += 6 * EPSILON * held

    def _look(self, *_: Any) -> None:
        self._before = _parameters(self.model)

    def _count(self, *_: Any) -> None:
        self.given = self.given + self._before - _parameters(self.model)


def soak(
    num_steps: int, save_every: int, folder: Path, way: type[Gradients | Updates] = Gradients
) -> dict[str, Any]:
    """Train on this rank of a process group; what was seen."""
    torch.manual_seed(0)
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    teacher = torch.randn(32, 10, generator=torch.Generator().manual_seed(0))
    trained = way(model)
    looks, begun = [], time.perf_counter()
    with regtopk.Checkpoints(folder, asynchronous=True) as checkpoints:
        for step in range(1, num_steps + 1):
            x, y = batch(step, rank, teacher)
            trained.optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            trained.step()
            if step % max(num_steps // LOOKS, 1) == 0:
                looks.append({"step": step, **resources()})
            if step % save_every == 0:
                checkpoints.save(step, **trained.saved)
    trained.finish()
    owed = (trained.given - _residual(trained.exchange)) / num_workers
    dist.all_reduce(owed)
    largest_bound = torch.tensor(trained.bound, dtype=torch.float64)
    dist.all_reduce(largest_bound, op=dist.ReduceOp.MAX)
    parameters = _parameters(model)
    everyones = [torch.empty_like(parameters) for _ in range(num_workers)]
    dist.all_gather(everyones, parameters)
    trained.exchange.close()
    return {
        "looks": looks,
        "are_parameters_equal": all(torch.equal(theirs, parameters) for theirs in everyones),
        "law_error": float((owed - trained.aggregates).abs().max()),
        "law_bound": float(largest_bound),
        "checkpoints": sorted(path.name.rpartition("-")[0] for path in folder.glob("step-*")),
        "seconds": round(time.perf_counter() - begun, 1),
    }


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def _parameters(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().double()


def _residual(exchange: regtopk.Exchange | regtopk.UpdateExchange) -> Tensor:
    """What this rank has not sent yet, in the order of the parameters."""
    entries = exchange.state_dict()["workers"][str(exchange.rank)]["entries"]
    return torch.cat([parts["residual"].flatten() for parts in entries.values()]).double()


def _run(
    rank: int, num_workers: int, store: str, num_steps: int, save_every: int, folder: str, way: Any
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_workers)
    seen = soak(num_steps, save_every, Path(folder) / "checkpoints", way)
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    gc.collect()  # what refers to itself would keep the group's threads alive into Python's exit
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument(
        "--updates", action="store_true", help="not gradients: in two fragments, with a delay"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        way = Updates if arguments.updates else Gradients
        args = (arguments.workers, store, arguments.steps, arguments.save_every, folder, way)
        start_processes(_run, args, nprocs=arguments.workers, start_method="spawn")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(arguments.workers)]
    results = {
        "steps": arguments.steps,
        "way": way.__name__,
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
