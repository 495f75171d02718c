"""The work of torch that a calibration times: DDP, its hooks, and gloo's collectives."""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from regtopk.distributed.collectives import Collectives
from regtopk.plan.bench import Bench
from regtopk.plan.cases import Point
from regtopk.plan.exchange import Move, Work, all_gather, all_reduce, all_to_all, broadcast
from regtopk.plan.methods import BUCKET_BYTES, POWERSGD_RANK, numel_units

_MODELS = ((1024, 4), (256, 32), (1024, 12))  # width and depth of chains of matrices
_NUM_STEPS = 5
_ONE_BUCKET_MB = 1000
_SMALL_BYTES, _MESSAGE_BYTES = 64, 2**20
_NUM_CALLS = 24


def hook_points(bench: Bench) -> Iterator[Point]:
    """The time that DDP adds to a bare model, and that torch's hooks add to DDP, in a group of one."""
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for width, depth in _MODELS:
        plain, ddp, fp16, powersgd = (
            _time_model(bench, width, depth, name, group) for name in ("plain", "ddp", "fp16", "powersgd")
        )
        numel = depth * width * width
        yield Work("ddp", {"numel": numel}), max(0.0, ddp - plain)
        yield Work("fp16", {"numel": numel}), max(0.0, fp16 - ddp)
        yield Work("powersgd", {"messages": depth, **numel_units(numel)}), max(0.0, powersgd - ddp)


def _time_model(bench: Bench, width: int, depth: int, name: str, group: dist.ProcessGroup) -> float:
    """Seconds of a forward and backward pass of a chain of matrices whose own work is small."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    model: nn.Module = nn.Sequential(*layers).to(bench.device)
    if name != "plain":
        bucket_cap_mb = _ONE_BUCKET_MB if name == "powersgd" else None
        model = ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_cap_mb)
        if name == "fp16":
            ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
        if name == "powersgd":
            state = powerSGD_hook.PowerSGDState(group, POWERSGD_RANK, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    x = torch.randn(1, width, device=bench.device)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(4):  # DDP makes its buckets in the first two, PowerSGD begins in the third
        step()
    return median(bench.seconds(step) for _ in range(_NUM_STEPS))


def collective_points(bench: Bench) -> Iterator[Point]:
    """Messages and bytes of gloo's collectives between the processes: what they cost without a network."""
    assert dist.group.WORLD is not None
    N, run = dist.get_world_size(), Collectives(dist.group.WORLD)
    for size in (_SMALL_BYTES, BUCKET_BYTES):
        vector, half = torch.zeros(size // 4), torch.zeros(size // 2, dtype=torch.float16)
        yield _time_calls(bench, all_reduce(size, N), partial(dist.all_reduce, vector))
        yield _time_calls(bench, all_reduce(size, N, "all_reduce half"), partial(dist.all_reduce, half))
    for size in (_SMALL_BYTES, _MESSAGE_BYTES):
        vector, many = torch.zeros(size // 4), torch.zeros(N * (size // 4))
        yield _time_calls(bench, broadcast(size, N), partial(dist.broadcast, vector, 0))
        swap = partial(dist.all_to_all_single, torch.empty_like(many), many)
        yield _time_calls(bench, all_to_all(size, N), swap)
        yield _time_calls(bench, all_gather(size, N), partial(run.all_gather, vector))


def _time_calls(bench: Bench, move: Move, run: Callable[[], Any]) -> Point:
    """Many calls after one another, since processes come to a single one at different times."""
    num_calls = _NUM_CALLS if move.sent_bytes < BUCKET_BYTES else _NUM_CALLS // 6
    run()
    dist.barrier()
    return move.work, bench.seconds(lambda: [run() for _ in range(num_calls)]) / num_calls
