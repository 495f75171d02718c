"""What DistributedDataParallel and torch's own hooks compute, timed on a group of one: nothing travels."""

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

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

Wrap = Callable[[nn.Module], nn.Module]


def hook_points(group: dist.ProcessGroup, bench: Bench) -> Iterator[Point]:
    """The time that DDP adds to a bare model, and that torch's fp16 and PowerSGD hooks add to DDP."""
    for width, depth in _MODELS:
        wraps: list[Wrap] = [
            lambda net: net,
            lambda net: _wrapped(net, group),
            lambda net: _with_fp16(net, group),
            lambda net: _with_powersgd(net, group),
        ]
        plain, ddp, fp16, powersgd = (_time(width, depth, wrap, bench) for wrap in wraps)
        numel = float(depth * width * width)
        yield "ddp", {"numel": numel}, max(0.0, ddp - plain)
        yield "fp16", {"numel": numel}, max(0.0, fp16 - ddp)
        yield "powersgd", {"messages": depth, **numel_units(numel)}, max(0.0, powersgd - ddp)


def _time(width: int, depth: int, wrap: Wrap, bench: Bench) -> float:
    """Seconds of a forward and backward pass of a chain of matrices whose own work is small."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    model = wrap(nn.Sequential(*layers).to(bench.device))
    x = torch.randn(1, width, device=bench.device)

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(4):  # DDP makes its buckets in the first two, PowerSGD begins in the third
        step()
    return median(bench.seconds(step) for _ in range(_NUM_STEPS))


def _wrapped(net: nn.Module, group: dist.ProcessGroup, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(net, process_group=group, **options)


def _with_fp16(net: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    model = _wrapped(net, group)
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return model


def _with_powersgd(net: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    model = _wrapped(net, group, bucket_cap_mb=_ONE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model
