"""What does a whole exchange cost beside its collectives, and in which passes over all J entries?

The yardstick is `a.add_(b)` on vectors of J entries: read both, write one. Every exchange of one rank is
split into its passes: how often each runs, the bytes it moves, and its time. Beside them torch's PowerSGD
hook (rank 2) on the same buckets of DDP.

One process plays one rank of N in torch's "fake" process group, which every rank has joined at once. What the
others would send is the rank's own contribution, N times (`own_by_all`). The time of collectives is left out,
everything else is real, and N messages are decoded and added. (They hold the same entries; those of real
ranks differ, which is work of the size of k.)
A network of 64 square layers stands for a model. DDP makes its buckets in two real backward passes; then
every round gives the buckets the gradient anew, untimed, and runs what the hook runs.

All take turns, round after round, because times of a shared machine drift. Whole exchanges are timed in
rounds without a split; what is printed is the median over rounds of each round's ratio to its own add. On a
GPU these are plain launches, as in training. Their time is that of the device, by events, without
collectives. Beside it stands the host's clock, from an idle device to an idle device, collectives included.

`--ranks N` has N real ranks instead, which share the device: NCCL takes each for a host of its own and talks
by sockets. What is printed is rank 0's.

    python benchmarks/exchange.py [--device cuda] [--numel J ...] [--density D] [--value-code CODE]
                                  [--workers N | --ranks N] [--rounds R] [--only WORD ...] [--json]
                                  [--out FILE]
"""

import argparse
import json
import math
import os
import platform
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.testing._internal.distributed.fake_pg  # registers the backend
from reporting import give, parser_for
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk import kernels
from regtopk.algorithms.posterior import PosteriorScore
from regtopk.core.timer import Timer
from regtopk.distributed.requests import gather
from regtopk.distributed.state import buckets
from regtopk.distributed.transport.collectives import Collectives
from regtopk.distributed.updates import rank_rounds
from regtopk.distributed.updates.model import LocalModel
from regtopk.kernels.dispatch import kernel_named
from regtopk.rounds import LocalRounds

DEPTH = 64
ADD = "add"
REST = "all else"
COLLECTIVES = "collectives"
HOST = "by the host's clock"


class Pass(NamedTuple):
    """A function whose time counts as one pass, without that of other passes inside it."""

    name: str
    owner: Any
    function: str
    bytes_per_entry: int = 0  # of all J that it reads and writes; 0: its work has the size of k


def collectives() -> list[Pass]:
    """What is left out; the small ones that ranks agree by are among them."""
    return [Pass(COLLECTIVES, Collectives, name) for name in ("all_gather", "all_reduce", "all_to_all")]


def passes(device: torch.device) -> list[Pass]:
    """Where the library works on all J entries, and what else takes time."""
    kernel = kernel_named(kernels.describe(device).kernel)
    return [
        Pass("take the update", LocalModel, "take_update", 12),  # a join, too, and counted for this one
        Pass("join, find NaN and inf", kernels, "join_", 8),
        Pass("find NaN and inf", kernels, "is_finite", 4),
        Pass("keep the state", buckets.Bucket, "keep_state", 8),
        Pass("score", PosteriorScore, "scores"),
        Pass("accumulate and select", kernel, "take_largest_", 12),
        Pass("encode", gather, "encode"),
        Pass("decode", gather, "decode_rows"),
        Pass("sum", kernels, "add_in_rank_order_", 4),
        Pass("write the aggregate", kernels, "spread_", 4),
        Pass("subtract the aggregate", rank_rounds, "subtract_"),
        Pass("write the model", LocalRounds, "_go_on", 8),
    ]


@contextmanager
def split_into(passes: list[Pass], timer: Timer, counts: dict[str, int]) -> Iterator[None]:
    """Time these functions, while they are called in this block; outside of it they are as ever."""

    def timed(each: Pass, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[each.name] = counts.get(each.name, 0) + 1
            with timer.phase(each.name):
                return function(*args, **kwargs)

        return call

    originals = [getattr(each.owner, each.function) for each in passes]
    for each, original in zip(passes, originals, strict=True):
        setattr(each.owner, each.function, timed(each, original))
    try:
        yield
    finally:
        for each, original in zip(passes, originals, strict=True):
            setattr(each.owner, each.function, original)


@dataclass
class Exchanged:
    """One exchange on its own model: what it is given before each round, and what is timed."""

    refresh: Callable[[], None]
    run: Callable[[], None]


@dataclass
class FakeBucket:
    """What a hook sees of a bucket, outside of a backward pass."""

    original: Any
    number: int
    is_the_last: bool

    def __post_init__(self) -> None:
        self._gradients, self._parameters = self.original.gradients(), self.original.parameters()
        self._buffer, self.original = self.original.buffer(), None  # it ends with the backward pass

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.is_the_last

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self._gradients

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def set_buffer(self, buffer: Tensor) -> None:
        self._buffer = buffer


class Net(nn.Module):
    """Layers of weights and biases whose gradients are given vectors."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__()
        width = round(math.sqrt(numel / DEPTH))
        shapes = [shape for _ in range(DEPTH) for shape in ((width, width), (width,))]
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes)

    def forward(self) -> Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


def buckets_of(numel: int, device: torch.device) -> tuple[DistributedDataParallel, list[FakeBucket]]:
    """A model and its buckets, as DDP makes them in the second backward pass."""
    model = DistributedDataParallel(Net(numel, device), gradient_as_bucket_view=True)
    found: list[FakeBucket] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        found.append(FakeBucket(bucket, bucket.index(), bucket.is_last()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    for _ in range(2):
        found.clear()
        model().backward()
    return model, found


def with_ours(numel: int, device: torch.device, gradient: Tensor, algorithm: Any) -> Exchanged:
    """What `attach`'s hook runs."""
    model, found = buckets_of(numel, device)
    state = regtopk.SparseHookState(model, algorithm, collective="all_gather")
    grads = {}
    for bucket in found:
        names = [state._names[id(p)] for p in bucket.parameters()]
        grads |= zip(names, bucket.gradients(), strict=True)
    run = torch.no_grad()(lambda: state._steps.run(grads))
    return Exchanged(lambda: spread(gradient, [bucket.buffer() for bucket in found]), run)


def with_exchange(numel: int, device: torch.device, gradient: Tensor, algorithm: Any) -> Exchanged:
    net = Net(numel, device)
    exchange = regtopk.Exchange(net, algorithm, collective="all_gather")
    grads = []
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
        grads.append(p.grad)
    return Exchanged(lambda: spread(gradient, grads), exchange.step)


def with_updates(numel: int, device: torch.device, gradient: Tensor, algorithm: Any) -> Exchanged:
    """The optimizer finds no gradient and changes nothing: what is timed is the exchange."""
    net = Net(numel, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    exchange = regtopk.UpdateExchange(net, optimizer, algorithm, collective="all_gather")
    tensors = [p.data for p in net.parameters()]
    starts = [p.data for p in exchange._model.start.values()]

    def refresh() -> None:
        spread(gradient, tensors)
        torch._foreach_add_(tensors, starts)

    return Exchanged(refresh, optimizer.step)


def with_powersgd(numel: int, device: torch.device, gradient: Tensor) -> Exchanged:
    """It divides by the number of ranks, and does all else on one rank as on many."""
    _, found = buckets_of(numel, device)
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)

    def run() -> None:
        for bucket in found:
            powersgd.powerSGD_hook(state, bucket).wait()

    return Exchanged(lambda: spread(gradient, [b.buffer() for b in found]), torch.no_grad()(run))


def spread(gradient: Tensor, tensors: list[Tensor]) -> None:
    """Write parts of the gradient into tensors, one after another."""
    start = 0
    for tensor in tensors:
        tensor.copy_(gradient[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def exchanges(
    numel: int, device: torch.device, gradient: Tensor, density: float, value_code: str
) -> dict[str, Any]:
    """By name, what makes each; one at a time, because each holds its own model."""
    table: dict[str, Any] = {}
    for name, kind in (("RegTop-k", regtopk.RegTopK), ("Top-k", regtopk.TopK)):
        algorithm = kind(density=density, value_code=value_code)
        table[f"{name}, model"] = lambda a=algorithm: with_ours(numel, device, gradient, a)
        table[f"{name}, Exchange"] = lambda a=algorithm: with_exchange(numel, device, gradient, a)
        table[f"{name}, updates"] = lambda a=algorithm: with_updates(numel, device, gradient, a)
    table["torch PowerSGD"] = lambda: with_powersgd(numel, device, gradient)
    return table


def measure(make: Callable[[], Exchanged], gradient: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """The whole exchange against the add, round by round, and then its passes."""
    device, exchanged = gradient.device, make()
    accumulated = torch.zeros_like(gradient)
    table = passes(device)
    rounds: list[dict[str, float]] = []
    split: list[dict[str, float]] = []
    counts: dict[str, int] = {}
    split_counts: dict[str, int] = {}
    for number in range(-3, 2 * options.rounds):  # the first three warm up
        exchanged.refresh()
        timer = Timer(device)
        with timer.phase(ADD):
            accumulated.add_(gradient)
        is_split = number >= 0 and number % 2 == 0
        counts.clear()
        begun_s = idle_at(device)
        with split_into([*collectives(), *(table if is_split else [])], timer, counts), timer.phase(REST):
            exchanged.run()
        host_s = idle_at(device) - begun_s
        if is_split:
            split_counts = dict(counts)
        if number >= 0:
            (split if is_split else rounds).append({**timer.seconds(), HOST: host_s})
    numel = gradient.numel()
    entries = {each.name: each.bytes_per_entry * numel for each in table}
    found = [
        {
            "pass": name,
            "calls": split_counts.get(name, 1),
            "bytes": entries.get(name, 0),
            "ms": 1e3 * statistics.median(seconds[name] for seconds in split),
        }
        for name in [each.name for each in table if each.name in split_counts] + [REST]
    ]
    return {
        "ms": 1e3 * statistics.median(seconds[REST] for seconds in rounds),
        "over_add": statistics.median(seconds[REST] / seconds[ADD] for seconds in rounds),
        "host_ms": 1e3 * statistics.median(seconds[HOST] for seconds in rounds),
        "host_over_add": statistics.median(seconds[HOST] / seconds[ADD] for seconds in rounds),
        "passes": found,
    }


def idle_at(device: torch.device) -> float:
    """The host's clock once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def group_for(exchange: str, device: torch.device, options: argparse.Namespace) -> Iterator[None]:
    """Real ranks, or the fake group; for PowerSGD, which that does not answer, this rank alone."""
    is_fake = not options.ranks and "PowerSGD" not in exchange
    backend = "nccl" if device.type == "cuda" else "gloo"
    if options.ranks:
        store: Any = dist.FileStore(f"{options.folder}/{exchange}", options.ranks)
        dist.init_process_group(backend, store=store, rank=options.rank, world_size=options.ranks)
    elif not is_fake:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        store = AllThere()  # kept until the end: torch does not
        dist.init_process_group("fake", store=store, rank=0, world_size=options.workers)
    try:
        with patch.object(Collectives, "all_gather", own_by_all) if is_fake else nullcontext():
            yield
        dist.barrier()  # gloo's threads let go of the last step: one that ends the group itself aborts
    finally:
        dist.destroy_process_group()


def own_by_all(self: Collectives, tensor: Tensor) -> Tensor:
    """As if all ranks sent the same: the fake group leaves what it received as it was, on some devices."""
    return tensor.unsqueeze(0).repeat(self.num_workers, 1)


class AllThere(dist.Store):
    """A store whose ranks have always just arrived."""

    def set(self, key: str, value: str) -> None: ...
    def wait(self, keys: list[str], timeout: Any = None) -> None: ...


def run(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    results = []
    for numel in options.numel:
        width = round(math.sqrt(numel / DEPTH))
        J = DEPTH * (width * width + width)
        gradient = torch.randn(J, generator=torch.Generator(device).manual_seed(0), device=device)
        for name, make in exchanges(J, device, gradient, options.density, options.value_code).items():
            if options.only and not any(word in name for word in options.only):
                continue
            with group_for(f"{name} {numel}", device, options):
                results.append({"exchange": name, "numel": J, **measure(make, gradient, options)})
    is_cuda = device.type == "cuda"
    return {
        "command": f"benchmarks/exchange.py --device {options.device} --numel "
        f"{' '.join(map(str, options.numel))} --density {options.density} --value-code {options.value_code} "
        f"{f'--ranks {options.ranks}' if options.ranks else f'--workers {options.workers}'} "
        f"--rounds {options.rounds}" + (f" --only {shlex.join(options.only)}" if options.only else ""),
        "device": torch.cuda.get_device_name() if is_cuda else f"CPU, {torch.get_num_threads()} threads",
        "num_cpus": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "kernel": kernels.describe(device).kernel,
        "results": results,
    }


def run_by_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 of real ranks found."""
    with tempfile.TemporaryDirectory() as options.folder:
        mp.spawn(run_rank, (options,), nprocs=options.ranks)
        found: dict[str, Any] = json.loads(Path(options.folder, "report.json").read_text())
        return found


def run_rank(rank: int, options: argparse.Namespace) -> None:
    """One of them: a host of its own to NCCL, which refuses a GPU that two ranks of one host share."""
    os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    options.rank = rank
    report = run(options)
    if rank == 0:
        Path(options.folder, "report.json").write_text(json.dumps(report))


def show(report: dict[str, Any]) -> None:
    print(f"{report['device']}, {report['machine']}, torch {report['torch']}: {report['command']}")
    for row in report["results"]:
        took = f"{row['ms']:.1f} ms, {row['over_add']:.2f} times the add"
        whole = f"{HOST} {row['host_ms']:.1f} ms, {row['host_over_add']:.2f} times"
        print(f"\n{row['exchange']}, J = {row['numel']:,}: {took}; {whole}")
        for each in row["passes"]:
            moved = f"{each['bytes'] / 1e6:8.0f} MB" if each["bytes"] else "           "
            print(f"  {each['pass']:<24} {each['calls']:4} x {moved} {each['ms']:9.2f} ms")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--numel", type=int, nargs="+", default=[11_173_962, 124_000_000])
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--value-code", default="float32")
    parser.add_argument("--workers", type=int, default=4, help="of the fake group")
    parser.add_argument("--ranks", type=int, default=0, help="so many real ones, which share the device")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", help="words: exchanges whose name has one of them")
    options = parser.parse_args()
    give(run_by_ranks(options) if options.ranks else run(options), options, show)


if __name__ == "__main__":
    main()
