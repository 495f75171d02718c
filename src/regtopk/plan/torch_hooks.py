"""What DistributedDataParallel and torch's own hooks compute, timed on a group of one: nothing travels."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from regtopk.plan.baselines import POWERSGD_RANK
from regtopk.plan.cases import Point

_SIDE, _DEPTH = 1024, 4
_NUM_STEPS = 6
_ONE_BUCKET_MB = 1000


def hook_points(group: dist.ProcessGroup, device: torch.device) -> Iterator[Point]:
    """Of DDP over no DDP, of the fp16 hook over DDP, and of PowerSGD over DDP: seconds an entry."""
    plain = _time(lambda net: net, device)
    ddp = _time(lambda net: _wrapped(net, group), device)
    fp16 = _time(lambda net: _with_fp16(net, group), device)
    powersgd = _time(lambda net: _with_powersgd(net, group), device)
    numel = _DEPTH * _SIDE * _SIDE
    for line, seconds in (("ddp", ddp - plain), ("fp16", fp16 - ddp), ("powersgd", powersgd - ddp)):
        yield line, {"numel": numel}, max(0.0, seconds)


def _time(wrap: Callable[[nn.Module], nn.Module], device: torch.device) -> float:
    """Seconds of a forward and backward pass of a chain of matrices whose own work is small."""
    layers = [nn.Linear(_SIDE, _SIDE, bias=False) for _ in range(_DEPTH)]
    model = wrap(nn.Sequential(*layers).to(device))
    x = torch.randn(1, _SIDE, device=device)
    times = []
    for _ in range(_NUM_STEPS + 4):  # DDP makes its buckets in the first two, PowerSGD begins in the third
        model.zero_grad()
        start = time.perf_counter()
        model(x).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[4:])


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
