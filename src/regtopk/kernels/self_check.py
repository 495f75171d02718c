"""Does the kernel that runs here agree with the reference? Tried for a few seconds on random input."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.kernels.dispatch import Kernel, describe, kernel_named
from regtopk.kernels.reference import selection as reference
from regtopk.kernels.reference.selection import Damped

_SMALLEST_NUMEL = 1 << 16  # small, so that many cases fit in the time
_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class SelfCheck:
    """How many random cases agreed, and the first that did not, if any."""

    num_cases: int
    failure: str | None


def self_check(device: torch.device | str = "cpu", seconds: float = 2.0) -> SelfCheck:
    """Compare the kernel of a device with the reference until the time is over, at least once per dtype."""
    device = torch.device(device)
    generator = torch.Generator().manual_seed(0)
    kernel = kernel_named(describe(device).kernel)
    num_cases, stop = 0, math.inf
    while time.perf_counter() < stop:
        numel = int(torch.randint(_SMALLEST_NUMEL, _SMALLEST_NUMEL + 50_000, (), generator=generator))
        k = int(torch.randint(1, numel // 20, (), generator=generator))
        dtype = _GRAD_DTYPES[num_cases % len(_GRAD_DTYPES)]
        grad = torch.randn(2, numel, generator=generator).to(dtype)
        if num_cases % 3 == 2:
            grad = grad.round()  # many equal entries
        if not _agrees(kernel, grad.to(device), k, generator):
            return SelfCheck(num_cases, f"J = {numel}, k = {k}, gradient of {dtype}")
        num_cases += 1
        if num_cases == len(_GRAD_DTYPES):
            stop = time.perf_counter() + seconds
    return SelfCheck(num_cases, None)


def _agrees(kernel: Kernel, grad: Tensor, k: int, generator: torch.Generator) -> bool:
    """One step from residual zero: the same entries taken, and the same left."""
    indices = torch.rand(grad.shape, generator=generator).topk(k, dim=-1).indices.sort(-1).values
    indices, scores = indices.to(grad.device), torch.rand(2, k, generator=generator).to(grad.device)
    damped = Damped(indices, scores * grad.float().abs().gather(-1, indices))
    results = []
    for take_largest_ in (kernel.take_largest_, reference.take_largest_):
        residual = torch.zeros_like(grad, dtype=torch.float32)
        results.append((*take_largest_(residual, grad, k, damped), residual))
    return all(map(torch.equal, *results))
