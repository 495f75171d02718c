"""How far is a selection step from the speed of memory?

The floor is `residual.add_(grad)`: read both, write one. Beside it, on the same vectors: our Top-k and
RegTop-k steps (gradient checked for NaN and inf, accumulated, k largest found, moved out), and the same in
plain torch (unchecked). On a CPU all take turns, round after round, because times of a shared machine drift;
what is printed is the median over the rounds. On a GPU each is timed as plain launches and as a captured
graph, over several input sets where one would fit in the cache, and beside a device-to-device copy.

Temporaries are what a step allocates at its peak beyond its inputs and results, also on the worst input, all
entries equal.

    python benchmarks/kernels.py [--device cuda] [--numel J ...] [--density D ...] [--rounds R]
                                 [--stages] [--tiles] [--json] [--out FILE]
"""

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from regtopk import kernels
from regtopk.kernels import reference

FLOOR, TOPK, REGTOPK = "in-place add", "Top-k", "RegTop-k"
PLAIN_TOPK, PLAIN_REGTOPK = "Top-k, plain torch", "RegTop-k, plain torch"
COPY = "copy"
CACHE_BYTES = 1 << 28  # of a GPU, generously: input sets together are larger

Step = Callable[[], Any]


class Vectors:
    """One input set, and the steps on it."""

    def __init__(self, numel: int, density: float, device: torch.device) -> None:
        self.k = max(1, round(density * numel))
        self.residual = torch.randn(numel, device=device)
        self.grad = torch.randn(numel, device=device)
        self.kernel = import_module(
            f"regtopk.kernels.{kernels.describe(device).kernel}"
        )  # also if J is small
        self.damped, _ = self.kernel.take_largest_(self.residual, self.grad, self.k)
        self.damping = torch.rand(self.k, device=device)
        self.flag = torch.zeros((), dtype=torch.bool, device=device)

    def steps(self) -> dict[str, Step]:
        return {
            FLOOR: lambda: self.residual.add_(self.grad),
            TOPK: self.topk,
            REGTOPK: self.regtopk,
            PLAIN_TOPK: self.plain_topk,
            PLAIN_REGTOPK: lambda: reference.take_largest_(
                self.residual, self.grad, self.k, damped=self.damped, damping=self.damping
            ),
        }

    def topk(self) -> Any:
        return self.kernel.take_largest_(self.residual, self.grad, self.k, non_finite=self.flag)

    def regtopk(self) -> Any:
        return self.kernel.take_largest_(
            self.residual, self.grad, self.k, damped=self.damped, damping=self.damping, non_finite=self.flag
        )

    def plain_topk(self) -> Any:
        self.residual.add_(self.grad)
        indices = self.residual.abs().topk(self.k, sorted=False).indices
        values = self.residual.gather(-1, indices)
        self.residual.scatter_(-1, indices, 0.0)
        return indices, values


def time_on_cpu(numel: int, density: float, rounds: int) -> dict[str, list[float]]:
    vectors = Vectors(numel, density, torch.device("cpu"))
    steps = vectors.steps()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-1, rounds):  # the first is to warm up
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def time_on_gpu(
    numel: int, density: float, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Of plain launches, and of replayed graphs."""
    num_sets = max(1, -(-CACHE_BYTES // (8 * numel)))
    sets = [Vectors(numel, density, torch.device("cuda")) for _ in range(num_sets)]
    steps: dict[str, list[Step]] = {name: [v.steps()[name] for v in sets] for name in sets[0].steps()}
    copies = torch.empty(numel, device="cuda")
    steps[COPY] = [lambda v=v: copies.copy_(v.grad) for v in sets]  # type: ignore[misc]
    plain: dict[str, list[float]] = {name: [] for name in steps}
    graphed: dict[str, list[float]] = {name: [] for name in steps}
    graphs = {name: captured(of_sets) for name, of_sets in steps.items()}
    for _ in range(rounds):
        for name, of_sets in steps.items():
            plain[name].append(elapsed_s(lambda of_sets=of_sets: [step() for step in of_sets]) / num_sets)  # type: ignore[misc]
            graphed[name].append(elapsed_s(graphs[name].replay) / num_sets)
    return plain, graphed


def captured(of_sets: list[Step]) -> torch.cuda.CUDAGraph:
    for step in of_sets:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in of_sets:
            step()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def elapsed_s(function: Step, repeats: int = 5) -> float:
    """Mean of a few, between two events."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        function()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / repeats


def temporary_bytes(numel: int, density: float, device: torch.device, is_equal: bool) -> int:
    """Peak of a RegTop-k step beyond its inputs and results."""
    vectors = Vectors(numel, density, device)
    if is_equal:
        vectors.residual.zero_()
        vectors.grad.fill_(0.5)
    vectors.regtopk()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = vectors.regtopk()
        peak = torch.cuda.max_memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident_bytes("VmRSS")
        results = vectors.regtopk()
        peak = resident_bytes("VmHWM")
    return int(peak - before - sum(x.nbytes for x in results))


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(numel: int, density: float, device: torch.device, rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {"numel": numel, "density": density, "k": max(1, round(density * numel))}
    if device.type == "cuda":
        plain, graphed = time_on_gpu(numel, density, rounds)
        result["plain_launches"], result["graph"] = summary(plain), summary(graphed)
    else:
        result["plain_launches"] = summary(time_on_cpu(numel, density, rounds))
    is_linux = platform.system() == "Linux"
    if device.type == "cuda" or is_linux:
        result["temporary_bytes"] = {
            "normal": temporary_bytes(numel, density, device, is_equal=False),
            "all equal": temporary_bytes(numel, density, device, is_equal=True),
        }
    return result


def summary(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians; and medians over the rounds of each round's ratio."""

    def over(above: str, below: str) -> float:
        return statistics.median(a / b for a, b in zip(times[above], times[below], strict=True))

    found = {
        "median_s": {name: statistics.median(all_s) for name, all_s in times.items()},
        "times_the_add": {name: over(name, FLOOR) for name in (TOPK, REGTOPK)},
        "times_faster_than_plain": {TOPK: over(PLAIN_TOPK, TOPK), REGTOPK: over(PLAIN_REGTOPK, REGTOPK)},
        "regtopk_over_topk": over(REGTOPK, TOPK),
    }
    if COPY in times:  # a step moves 12 bytes an entry, a copy 8
        found["share_of_copy_bandwidth"] = {n: 1.5 * over(COPY, n) for n in (FLOOR, TOPK, REGTOPK)}
    return found


def show(report: dict[str, Any]) -> None:
    print(f"{report['device']}, {report['num_threads']} threads, torch {report['torch']}; {report['kernel']}")
    for result in report["results"]:
        print(f"\nJ = {result['numel']:,}, density {result['density']:g}, k = {result['k']:,}")
        for kind in ("plain_launches", "graph"):
            if kind in result:
                show_times(kind.replace("_", " "), result[kind])
        for name, num_bytes in result.get("temporary_bytes", {}).items():
            limit = result["numel"] / 16
            print(f"  temporaries, {name}: {num_bytes / 1e6:.2f} MB, {num_bytes / limit:.2f} of J / 16 bytes")


def show_times(kind: str, found: dict[str, Any]) -> None:
    times = ", ".join(f"{name} {1e3 * t:.3f}" for name, t in found["median_s"].items())
    print(f"  {kind}, ms: {times}")
    print(
        "    times the add: "
        + ", ".join(f"{name} {x:.2f}" for name, x in found["times_the_add"].items())
        + "; times faster than plain torch: "
        + ", ".join(f"{name} {x:.1f}" for name, x in found["times_faster_than_plain"].items())
        + f"; RegTop-k over Top-k {found['regtopk_over_topk']:.3f}"
    )
    if "share_of_copy_bandwidth" in found:
        shares = found["share_of_copy_bandwidth"]
        print("    share of a copy's bandwidth: " + ", ".join(f"{n} {x:.2f}" for n, x in shares.items()))


def show_stages(numel: int, density: float) -> None:
    """Which kernel of a step takes how long, from torch's profiler."""
    vectors = Vectors(numel, density, torch.device("cuda"))
    vectors.regtopk()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(20):
            vectors.regtopk()
        torch.cuda.synchronize()
    print(f"\nRegTop-k's launches at J = {numel:,}, density {density:g}; us each")
    for event in sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total):
        print(f"  {event.self_device_time_total / event.count:>9.1f} x {event.count // 20}  {event.key[:90]}")


def show_tiles(numel: int, density: float) -> None:
    """Top-k's time for several sizes of the accumulating programs."""
    from regtopk.kernels import triton

    print(f"\nTop-k at J = {numel:,}, density {density:g}; us, by entries and warps of a program")
    vectors = Vectors(numel, density, torch.device("cuda"))
    chosen = triton._TILE, triton._TILE_WARPS
    for tile in (1 << 11, 1 << 12, 1 << 13, 1 << 14):
        for warps in (4, 8, 16):
            triton._TILE, triton._TILE_WARPS = tile, warps
            graph = captured([vectors.topk])
            times = [elapsed_s(graph.replay) for _ in range(5)]
            print(f"  {tile:>6} {warps:>3} {1e6 * statistics.median(times):>9.1f}")
            del graph
    triton._TILE, triton._TILE_WARPS = chosen


def describe_machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return names[0].split(":")[1].strip() if names else platform.machine()


def command_without_out(words: list[str]) -> str:
    """As typed, but for where the report went."""
    kept = [w for n, w in enumerate(words) if w != "--out" and words[n - 1 : n] != ["--out"]]
    return " ".join(["benchmarks/kernels.py", *kept])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--numel", type=int, nargs="+", default=[11_173_962, 124_000_000])
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01, 0.1])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, help="torch's number of threads, on a CPU")
    parser.add_argument("--stages", action="store_true", help="on a GPU: the time of each kernel launched")
    parser.add_argument("--tiles", action="store_true", help="on a GPU: try several sizes of a program")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, help="write JSON to this file too")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    choice = kernels.describe(arguments.device)
    report = {
        "command": command_without_out(sys.argv[1:]),
        "device": describe_machine(arguments.device),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernel": f"{choice.kernel}: {choice.reason}",
        "results": [
            measure(numel, density, arguments.device, arguments.rounds)
            for numel in arguments.numel
            for density in arguments.density
        ],
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.json:
        json.dump(report, sys.stdout, indent=1)
    else:
        show(report)
    for numel in arguments.numel:
        if arguments.stages:
            show_stages(numel, arguments.density[0])
        if arguments.tiles:
            show_tiles(numel, arguments.density[0])


if __name__ == "__main__":
    main()
