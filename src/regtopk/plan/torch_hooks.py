"""What DistributedDataParallel and torch's own hooks compute, timed on a group of one: nothing travels."""

from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from regtopk.plan.baselines import POWERSGD_RANK
from regtopk.plan.bench import Bench
from regtopk.plan.cases import Point
from regtopk.plan.methods import numel_units

_MODELS = ((1024, 4), (256, 32), (1024, 12))  # width and depth of chains of matrices
_NUM_STEPS = 5
_ONE_BUCKET_MB = 1000


def hook_points(group: dist.ProcessGroup, bench: Bench) -> Iterator[Point]:
    """The time that DDP adds to a bare model, and that torch's fp16 and PowerSGD hooks add to DDP."""
    for width, depth in _MODELS:
        plain, ddp, fp16, powersgd = (
            _time(width, depth, name, group, bench) for name in ("plain", "ddp", "fp16", "powersgd")
        )
        numel = float(depth * width * width)
        yield "ddp", {"numel": numel}, max(0.0, ddp - plain)
        yield "fp16", {"numel": numel}, max(0.0, fp16 - ddp)
        yield "powersgd", {"messages": depth, **numel_units(numel)}, max(0.0, powersgd - ddp)


def _time(width: int, depth: int, name: str, group: dist.ProcessGroup, bench: Bench) -> float:
    """Seconds of a forward and backward pass of a chain of matrices whose own work is small."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    model = _wrapped(nn.Sequential(*layers).to(bench.device), name, group)
    x = torch.randn(1, width, device=bench.device)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(4):  # DDP makes its buckets in the first two, PowerSGD begins in the third
        step()
    return median(bench.seconds(step) for _ in range(_NUM_STEPS))


def _wrapped(net: nn.Module, name: str, group: dist.ProcessGroup) -> nn.Module:
    if name == "plain":
        return net
    bucket_cap_mb = _ONE_BUCKET_MB if name == "powersgd" else None
    model = DistributedDataParallel(net, process_group=group, bucket_cap_mb=bucket_cap_mb)
    if name == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, POWERSGD_RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model
