"""How many bytes per parameter does an exchange of a sharded model take, and what does each of its parts?

Two processes are two replicas of a chain of linear layers, each an FSDP unit, on a mesh of one shard: a
rank's part is the whole of it, so the bytes per parameter are those of a part on any mesh. "kept" is what an
exchange holds between steps: its tensors, each memory counted once. "peak" is how much more a step takes at
most, beside what is kept, than the same step without an exchange: on CUDA as the allocator counts it, on a
CPU as the kernel counts resident pages. It holds messages, and what is made for a step.

    python benchmarks/fsdp_memory.py [--json] [--out FILE] [--width W] [--depth D] [--device cpu]
"""

import argparse
import gc
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from reporting import give, parser_for
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import regtopk

REPLICAS = 2
TOPK = regtopk.TopK(density=0.01, value_code="4bit")
ON_CPU = "theta_start on the CPU"
PARTS = {  # the names of what holds each kind of memory
    "gradient, until backward is over": ("_flats",),
    "residual": ("residual",),
    "theta_start": ("_flat",),
    ON_CPU: ("_kept",),
    "update": ("update", "_updates", "flat"),
    "last sum, written over": ("spare", "total"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "no exchange": {},
    "attach": {"kind": "attach"},
    "attach, residual in bfloat16": {"kind": "attach", "residual_dtype": "bfloat16"},
    "UpdateExchange": {"kind": "updates"},
    "UpdateExchange, residual in bfloat16": {"kind": "updates", "residual_dtype": "bfloat16"},
    "UpdateExchange, anchors on the CPU": {"kind": "updates", "anchors": "cpu"},
}


class Meter:
    """The most memory that was in use since it was set back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def set_back(self) -> int:
        """What is in use now."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        Path("/proc/self/clear_refs").write_text("5")
        return self._status("VmRSS")

    def peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return self._status("VmHWM")

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def tensors_of(thing: Any, path: tuple[str, ...], seen: set[int]) -> list[tuple[tuple[str, ...], Tensor]]:
    """All tensors that something of ours holds, with the names on the way to them."""
    if isinstance(thing, Tensor):
        return [(path, thing)]
    if id(thing) in seen or isinstance(thing, (nn.Module, torch.optim.Optimizer, type)):
        return []
    seen.add(id(thing))
    if isinstance(thing, dict):
        children = [(str(key), value) for key, value in thing.items()]
    elif hasattr(thing, "_fields"):
        children = [(name, getattr(thing, name)) for name in thing._fields]
    elif isinstance(thing, (list, tuple)):
        children = [("", value) for value in thing]
    elif type(thing).__module__.startswith("regtopk"):
        children = list(vars(thing).items())
    else:
        return []
    return [found for name, child in children for found in tensors_of(child, (*path, name), seen)]


def kept_bytes(exchange: Any, model: nn.Module) -> dict[str, int]:
    """What an exchange holds between steps, by part; the model's own memory is not its."""
    own = {p.to_local().untyped_storage().data_ptr() for p in model.parameters()}  # type: ignore[attr-defined]
    kept = dict.fromkeys([*PARTS, "other"], 0)
    found = tensors_of(exchange, (), set())
    for path, tensor in sorted(
        found, key=lambda pair: "_kept" not in pair[0]
    ):  # _flat may be the same memory
        memory = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = memory.untyped_storage()
        if storage.data_ptr() in own or storage.nbytes() == 0:
            continue
        own.add(storage.data_ptr())
        part = next((name for name, words in PARTS.items() if set(words) & set(path)), "other")
        kept[part] += storage.nbytes()
    return kept


def measure(name: str, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Bytes per parameter of one variant."""
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width) for _ in range(options.depth)]
    model: Any = nn.Sequential(*layers).to(device)
    for layer in layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = dict(VARIANTS[name])
    kind, exchange = given.pop("kind", None), None
    if kind == "attach":
        exchange = regtopk.attach(model, TOPK, process_group=mesh["replicate"], **given)
    elif kind == "updates":
        exchange = regtopk.UpdateExchange(model, optimizer, TOPK, process_group=mesh["replicate"], **given)
    meter = Meter(device)
    x = torch.randn(1, options.width, device=device)
    peaks = []
    for _ in range(7):
        before = meter.set_back()
        optimizer.zero_grad(set_to_none=False)
        model(x).square().sum().backward()
        optimizer.step()
        peaks.append(meter.peak() - before)
    peak = statistics.median(peaks[2:])  # from the third on memory is used again
    numel = sum(p.numel() for p in model.parameters())
    kept = {} if exchange is None else kept_bytes(exchange, model)
    return {
        "variant": name,
        "numel": numel,
        "kept": {part: size / numel for part, size in kept.items()},
        "step_peak": peak / numel,
    }


def rank_main(rank: int, options: argparse.Namespace, store: str) -> None:
    device = torch.device(options.device)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=REPLICAS)
    mesh = init_device_mesh(device.type, (REPLICAS, 1), mesh_dim_names=("replicate", "shard"))
    rows = []
    for name in VARIANTS:
        rows.append(measure(name, options, mesh, device))
        gc.collect()
    for row in rows:
        row["peak"] = row["step_peak"] - rows[0]["step_peak"]
    if rank == 0:
        report = {
            "density": TOPK.density,
            "device": options.device,
            "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
            "torch": torch.__version__,
            "bytes_per_parameter": rows,
        }
        give(report, options, show)
    dist.barrier()
    dist.destroy_process_group()


def show(report: dict[str, Any]) -> None:
    print("| bytes per parameter | " + " | ".join(PARTS) + " | kept on the device | peak beside it |")
    print("|---|" + "---:|" * (len(PARTS) + 2))
    for row in report["bytes_per_parameter"][1:]:
        kept = sum(row["kept"].values()) - row["kept"][ON_CPU]
        numbers = [f"{each:.2f}" for each in (*(row["kept"][part] for part in PARTS), kept, row["peak"])]
        print(f"| {row['variant']} | " + " | ".join(numbers) + " |")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is set free goes back to the kernel at once
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.start_processes(rank_main, (options, store), nprocs=REPLICAS)  # type: ignore[no-untyped-call, attr-defined]


if __name__ == "__main__":
    main()
