"""How far is a selection step from the speed of memory?

The floor is `residual.add_(grad)`: read both, write one. Beside it: our Top-k and RegTop-k steps (gradient
accumulated, k largest found, moved out; RegTop-k damps the k entries sent before), and the same in plain
torch. All take turns, round after round, because times of a shared machine
drift; what is printed is the median over the rounds. On a GPU each is timed as plain launches and as a
captured graph, over several input sets where one would fit in the cache, and beside a device-to-device copy.

Every kind of step has its own residual, which starts where `--warm-up` steps of error feedback led. A step
adds the same gradient each time (`--gradients 1`), which is the hard case: after some steps all entries below
the threshold pile up under it. With `--gradients G`, G of them take turns.

Temporaries are what a step allocates at its peak beyond its inputs and results, also on the worst input, all
entries equal.

    python benchmarks/kernels.py [--device cuda] [--numel J ...] [--density D ...] [--rows N] [--rounds R]
                                 [--warm-up W] [--gradients G] [--json] [--out FILE]
"""

import ctypes
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reporting import give, parser_for
from torch import Tensor

from regtopk import kernels
from regtopk.kernels.dispatch import kernel_named

FLOOR, TOPK, REGTOPK = "in-place add", "Top-k", "RegTop-k"
PLAIN_TOPK, PLAIN_REGTOPK = "Top-k, plain torch", "RegTop-k, plain torch"
COPY = "copy"
CACHE_BYTES = 1 << 28  # of a GPU, generously: input sets together are larger

Step = Callable[[], Any]
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Case:
    """What is measured: `num_rows` workers with J entries each."""

    numel: int
    density: float
    device: torch.device
    num_rows: int = 1
    num_warm_up: int = 0
    num_grads: int = 1

    @property
    def k(self) -> int:
        return max(1, round(self.density * self.numel))

    def normal(self) -> Tensor:
        return torch.randn(
            (self.num_rows, self.numel) if self.num_rows > 1 else self.numel, device=self.device
        )


class Vectors:
    """One input set, and the steps on it."""

    def __init__(self, case: Case) -> None:
        self.k = case.k
        self.kernel = kernel_named(kernels.describe(case.device).kernel)  # also if J is small
        self.grads = [case.normal() for _ in range(case.num_grads)]
        self.residual = case.normal()
        self.damped = self.topk(self.residual, 0)[0]
        for turn in range(case.num_warm_up):
            self.damped = self.topk(self.residual, turn)[0]
        size = self.residual.gather(-1, self.damped).abs()
        self.scores = size * torch.rand(size.shape, device=case.device)

    def steps(self) -> dict[str, list[Step]]:
        """Of each kind, one step for every gradient."""
        kinds = {
            FLOOR: lambda residual, turn: residual.add_(self.grads[turn]),
            TOPK: self.topk,
            REGTOPK: self.regtopk,
            PLAIN_TOPK: self.plain_topk,
            PLAIN_REGTOPK: self.plain_regtopk,
        }
        own = {name: self.residual.clone() for name in kinds}
        turns = range(len(self.grads))
        return {name: [partial(step, own[name], turn) for turn in turns] for name, step in kinds.items()}

    def topk(self, residual: Tensor, turn: int) -> tuple[Tensor, Tensor]:
        return self.kernel.take_largest_(residual, self.grads[turn % len(self.grads)], self.k)

    def regtopk(self, residual: Tensor, turn: int) -> tuple[Tensor, Tensor]:
        damped = kernels.Damped(self.damped, self.scores)
        return self.kernel.take_largest_(residual, self.grads[turn], self.k, damped)

    def plain_topk(self, residual: Tensor, turn: int) -> tuple[Tensor, Tensor]:
        residual.add_(self.grads[turn])
        return self._move_out(residual, residual.abs())

    def _move_out(self, residual: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        indices = score.topk(self.k, sorted=False).indices
        values = residual.gather(-1, indices)
        residual.scatter_(-1, indices, 0.0)
        return indices, values

    def plain_regtopk(self, residual: Tensor, turn: int) -> tuple[Tensor, Tensor]:
        residual.add_(self.grads[turn])
        score = residual.abs().scatter_(-1, self.damped, self.scores)
        return self._move_out(residual, score)


def time_on_cpu(case: Case, rounds: int) -> Times:
    steps = Vectors(case).steps()
    times: Times = {name: [] for name in steps}
    for turn in range(-1, rounds):  # the first is to warm up
        for name, of_kind in steps.items():
            start = time.perf_counter()
            of_kind[turn % len(of_kind)]()
            if turn >= 0:
                times[name].append(time.perf_counter() - start)
    return times


def time_on_gpu(case: Case, rounds: int) -> tuple[Times, Times]:
    """Of plain launches, and of replayed graphs."""
    num_sets = max(1, -(-CACHE_BYTES // (8 * case.num_rows * case.numel)))
    sets = [Vectors(case) for _ in range(num_sets)]
    of_sets = [vectors.steps() for vectors in sets]
    steps = {name: [step for of_set in of_sets for step in of_set[name]] for name in of_sets[0]}
    copies = torch.empty_like(sets[0].residual)
    steps[COPY] = [partial(copies.copy_, grad) for vectors in sets for grad in vectors.grads]
    plain: Times = {name: [] for name in steps}
    graphed: Times = {name: [] for name in steps}
    graphs = {name: captured(of_kind) for name, of_kind in steps.items()}
    for _ in range(rounds):
        for name, of_kind in steps.items():
            plain[name].append(elapsed_s(partial(run_all, of_kind)) / len(of_kind))
            graphed[name].append(elapsed_s(graphs[name].replay) / len(of_kind))
    graphed[COPY] = plain[COPY]  # in a graph another engine copies, which is slower
    return plain, graphed


def run_all(steps: list[Step]) -> None:
    for step in steps:
        step()


def captured(steps: list[Step]) -> torch.cuda.CUDAGraph:
    run_all(steps)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all(steps)
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


def temporary_bytes(case: Case, is_equal: bool) -> int:
    """Peak of a RegTop-k step beyond its inputs and results."""
    vectors = Vectors(replace(case, num_warm_up=0, num_grads=1))
    if is_equal:
        vectors.residual.zero_()
        vectors.grads[0].fill_(0.5)
    vectors.regtopk(vectors.residual, 0)
    if case.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = vectors.regtopk(vectors.residual, 0)
        peak = torch.cuda.max_memory_allocated()
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident_bytes("VmRSS")
        results = vectors.regtopk(vectors.residual, 0)
        peak = resident_bytes("VmHWM")
    return int(peak - before - sum(x.nbytes for x in results))


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(case: Case, rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {
        "numel": case.numel,
        "density": case.density,
        "k": case.k,
        "num_rows": case.num_rows,
        "num_warm_up": case.num_warm_up,
        "num_grads": case.num_grads,
    }
    if case.device.type == "cuda":
        plain, graphed = time_on_gpu(case, rounds)
        result["plain_launches"], result["graph"] = summary(plain), summary(graphed)
    else:
        result["plain_launches"] = summary(time_on_cpu(case, rounds))
    if case.device.type == "cuda" or platform.system() == "Linux":
        result["temporary_bytes"] = {
            "normal": temporary_bytes(case, is_equal=False),
            "all equal": temporary_bytes(case, is_equal=True),
        }
    return result


def summary(times: Times) -> dict[str, Any]:
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
        print(
            f"\n{result['num_rows']} x J = {result['numel']:,}, density {result['density']:g}, "
            f"k = {result['k']:,}, after {result['num_warm_up']} steps, gradients {result['num_grads']}"
        )
        for kind in ("plain_launches", "graph"):
            if kind in result:
                show_times(kind.replace("_", " "), result[kind])
        for name, num_bytes in result.get("temporary_bytes", {}).items():
            limit = result["num_rows"] * result["numel"] / 16
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


def describe_machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    cpus = Path("/proc/cpuinfo")
    names = [line for line in cpus.read_text().splitlines() if "model name" in line] if cpus.exists() else []
    return names[0].split(":")[1].strip() if names else platform.machine()


def command_without_out(words: list[str]) -> str:
    """As typed, but for where the report went."""
    kept = [w for n, w in enumerate(words) if w != "--out" and words[n - 1 : n] != ["--out"]]
    return " ".join(["benchmarks/kernels.py", *kept])


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--numel", type=int, nargs="+", default=[11_173_962, 124_000_000])
    parser.add_argument("--density", type=float, nargs="+", default=[0.001, 0.01, 0.1])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, help="torch's number of threads, on a CPU")
    parser.add_argument("--rows", type=int, default=1, help="workers in a batch")
    parser.add_argument("--warm-up", type=int, help="steps before; 20 on a CPU, 500 on a GPU")
    parser.add_argument("--gradients", type=int, default=1, help="that take turns")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    warm_up = arguments.warm_up
    if warm_up is None:
        warm_up = 500 if arguments.device.type == "cuda" else 20
    choice = kernels.describe(arguments.device)
    report = {
        "command": command_without_out(sys.argv[1:]),
        "device": describe_machine(arguments.device),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernel": f"{choice.kernel}: {choice.reason}",
        "results": [
            measure(
                Case(numel, density, arguments.device, arguments.rows, warm_up, arguments.gradients),
                arguments.rounds,
            )
            for numel in arguments.numel
            for density in arguments.density
        ],
    }
    give(report, arguments, show)


if __name__ == "__main__":
    main()
