"""Where a selection step's time goes on a GPU: each launch, and the size of the programs that accumulate.

python benchmarks/kernel_launches.py [--numel J ...] [--density D ...] [--rows N] [--warm-up W] [--tiles]
"""

import argparse
import statistics
from functools import partial

import torch
from kernels import REGTOPK, Case, Vectors, captured, elapsed_s

from regtopk.kernels.cuda import selection as cuda

NUM_STEPS = 20
# entries, warps, and registers of a thread at most
TILES = [
    (1024, 4, None), (2048, 4, None), (2048, 4, 64), (2048, 8, None), (4096, 4, None), (4096, 8, None),
    (4096, 8, 64), (4096, 16, None), (8192, 16, 64),
]  # fmt: skip


def show_launches(case: Case) -> None:
    """Which kernel of a RegTop-k step takes how long, from torch's profiler."""
    (step,) = Vectors(case).steps()[REGTOPK]
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(NUM_STEPS):
            step()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) / NUM_STEPS
    print(f"\nRegTop-k's launches, {case.num_rows} x J = {case.numel:,}, density {case.density:g}; us each")
    print(f"  {total:>9.1f} all")
    for event in events:
        if event.self_device_time_total < 1:
            continue
        times = event.self_device_time_total / event.count
        print(f"  {times:>9.1f} x {event.count / NUM_STEPS:g}  {event.key[:90]}")


def show_tiles(case: Case) -> None:
    """Top-k's time for several sizes of the accumulating programs, each from the same residual."""
    print(
        f"\nTop-k, {case.num_rows} x J = {case.numel:,}, density {case.density:g}; us, by entries and warps"
    )
    vectors = Vectors(case)
    chosen = cuda._TILE, cuda._TILE_WARPS, cuda._TILE_REGISTERS
    for tile, warps, registers in TILES:
        cuda._TILE, cuda._TILE_WARPS, cuda._TILE_REGISTERS = tile, warps, registers
        residual = vectors.residual.clone()
        graph = captured([partial(vectors.topk, residual, 0)])
        times = [elapsed_s(graph.replay) for _ in range(5)]
        print(f"  {tile:>6} {warps:>3} {registers!s:>5} {1e6 * statistics.median(times):>9.1f}", flush=True)
        del graph
    cuda._TILE, cuda._TILE_WARPS, cuda._TILE_REGISTERS = chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, nargs="+", default=[11_173_962, 124_000_000])
    parser.add_argument("--density", type=float, nargs="+", default=[0.001])
    parser.add_argument("--rows", type=int, default=1, help="workers in a batch")
    parser.add_argument("--warm-up", type=int, default=500, help="steps before")
    parser.add_argument("--tiles", action="store_true", help="try several sizes of a program")
    arguments = parser.parse_args()
    for numel in arguments.numel:
        for density in arguments.density:
            case = Case(numel, density, torch.device("cuda"), arguments.rows, arguments.warm_up)
            show_launches(case)
            if arguments.tiles:
                show_tiles(case)


if __name__ == "__main__":
    main()
