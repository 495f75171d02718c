"""Does simulating N workers cost more than one batched top-k, in time or in memory?

The yardstick is the step that anybody would write: accumulate, one `torch.topk` over (N, J), gather, scatter.
Beside it a step of `Cluster` with Top-k and with RegTop-k, the latter on the default kernels and on the
plain-torch ones. All take turns in one run, in an order that rotates; the table shows medians, and each over
the yardstick's.

Memory is the growth of the peak resident size (VmHWM in /proc/self/status, so Linux only) of a fresh process
over what was resident just before the gradients came to be, after a step on small vectors has loaded all
code. The gradients count; the unit is one dense (N, J) float32 array.

    python benchmarks/simulator.py [--json] [--out FILE] [--workers N] [--numel J] [--density D] [--repeats R]
"""

import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reporting import give, parser_for
from torch import Tensor

from regtopk import RegTopK, TopK, kernels
from regtopk.kernels.dispatch import VARIABLE
from regtopk.simulate import Cluster

YARDSTICK = "torch.topk, gather, scatter"
NAMES = (YARDSTICK, "topk", "regtopk", "regtopk, reference kernels")
SMALL_NUMEL = 1 << 16  # large enough for the kernels that large vectors use

Step = Callable[[Tensor], Tensor]


class PlainTopK:
    """Top-k with error feedback in the fewest torch calls."""

    def __init__(self, num_workers: int, numel: int, k: int) -> None:
        self.residual = torch.zeros(num_workers, numel)
        self.k = k

    def step(self, grads: Tensor) -> Tensor:
        num_workers, numel = grads.shape
        self.residual.add_(grads)
        indices = self.residual.abs().topk(self.k, dim=-1, sorted=False).indices
        values = self.residual.gather(-1, indices)
        self.residual.scatter_(-1, indices, 0.0)
        return torch.zeros(numel).scatter_add_(0, indices.flatten(), values.flatten() / num_workers)


def make(name: str, num_workers: int, numel: int, density: float) -> Step:
    """A contestant's step, from its initial state."""
    if name == YARDSTICK:
        return PlainTopK(num_workers, numel, max(1, round(density * numel))).step
    algorithm = TopK(density=density) if name == "topk" else RegTopK(density=density)
    step = Cluster(algorithm, num_workers=num_workers).step
    return on_reference_kernels(step) if name.endswith("reference kernels") else step


def on_reference_kernels(step: Step) -> Step:
    """The same step with REGTOPK_KERNELS=reference."""

    def forced(grads: Tensor) -> Tensor:
        os.environ[VARIABLE] = "reference"
        try:
            return step(grads)
        finally:
            del os.environ[VARIABLE]

    return forced


def median_times_s(num_workers: int, numel: int, density: float, repeats: int) -> dict[str, float]:
    """Medians over rounds in which every contestant makes one step; the first round warms up."""
    steps = {name: make(name, num_workers, numel, density) for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(repeats + 1):
        grads = torch.randn(num_workers, numel)
        for i in range(len(NAMES)):
            name = NAMES[(turn + i) % len(NAMES)]
            start = time.perf_counter()
            steps[name](grads)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def peak_arrays(name: str, num_workers: int, numel: int, density: float) -> float:
    """The most (N, J) float32 arrays alive in three steps, gradients included."""
    make(name, 2, SMALL_NUMEL, density)(torch.ones(2, SMALL_NUMEL))
    before = resident_bytes("VmRSS")
    grads = torch.randn(num_workers, numel)
    step = make(name, num_workers, numel, density)
    for _ in range(3):
        step(grads)
    return (resident_bytes("VmHWM") - before) / (4 * num_workers * numel)


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (the most so far) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(kilobytes)


def run(num_workers: int, numel: int, density: float, repeats: int) -> dict[str, Any]:
    sizes = (num_workers, numel, density)
    arrays = {}
    for name in NAMES:
        with multiprocessing.get_context("spawn").Pool(1) as process:
            arrays[name] = process.apply(peak_arrays, (name, *sizes))
    times_s = median_times_s(*sizes, repeats)
    return {
        "command": f"python benchmarks/simulator.py --workers {num_workers} --numel {numel} "
        f"--density {density} --repeats {repeats}",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "kernel": kernels.describe("cpu").reason,
        "results": [
            {
                "step": name,
                "median_s": times_s[name],
                "times_yardstick": times_s[name] / times_s[YARDSTICK],
                "peak_arrays": arrays[name],
            }
            for name in NAMES
        ],
    }


def show(report: dict[str, Any]) -> None:
    print(
        f"{report['machine']}, torch {report['torch']}, {report['num_threads']} threads; {report['kernel']}"
    )
    print(f"{'step':30} {'median':>10} {'x torch.topk':>13} {'peak (N, J) arrays':>19}")
    for row in report["results"]:
        print(
            f"{row['step']:30} {row['median_s'] * 1e3:7.0f} ms {row['times_yardstick']:13.2f} "
            f"{row['peak_arrays']:19.2f}"
        )


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--workers", type=int, default=1000, help="N")
    parser.add_argument("--numel", type=int, default=100_000, help="J")
    parser.add_argument("--density", type=float, default=0.01, help="k / J")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each contestant")
    arguments = parser.parse_args()
    report = run(arguments.workers, arguments.numel, arguments.density, arguments.repeats)
    give(report, arguments, show)


if __name__ == "__main__":
    main()
