"""Whether this machine has room for so many workers, before any of them starts."""

import math
from pathlib import Path

from benchmarks.slow_network.models import MODELS
from regtopk.errors import ArgumentError

PROCESS_BYTES = 450_000_000  # torch and its launcher
COPIES = 9  # of the model, at most: parameters, gradients, buckets, residual, momentum, sums, copies


def check_memory(num_workers: int, model: str) -> None:
    """Refuse more workers than fit.

    Raises:
        ArgumentError: says how many would.
    """
    numel = sum(math.prod(shape) for shape in MODELS[model]())
    each = PROCESS_BYTES + 4 * COPIES * numel
    there = available_bytes()
    if num_workers * each > there:
        raise ArgumentError(
            f"workers must fit into memory: {num_workers} need about {num_workers * each / 1e9:.1f} GB and "
            f"{there / 1e9:.1f} GB are free, which is enough for {there // each}"
        )


def available_bytes() -> int:
    """Memory that new processes can have."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/meminfo does not say what is available")
