"""What does the hook of `attach` cost in a step of a sharded GPT, and does it make the host wait in backward?

A GPT of 124 million parameters (12 layers of width 768, a unit each) trains on one device in several
settings: by one process, with NCCL where there is a GPU (1 x 1), and by two processes that share the
device, replicas joined by gloo (2 x 1), on a GPU also by NCCL, to which each says that it is a host of its
own. All variants run in turn, round after round, so their ratio does not drift with the machine. Printed is
the median over rounds of each round's ratio to no hook, which sends nothing at all.

On CUDA one more step of each variant, in the setting of one process, counts where the host waits for the
device inside backward (`torch.cuda.set_sync_debug_mode`), by line of code. No line is left out.

    python benchmarks/fsdp_step.py [--json] [--out FILE] [--rounds R] [--batch B ...] [--layers L] [--width W]
                                   [--device cpu]
"""

import argparse
import gc
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from reporting import give, parser_for
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import regtopk
from regtopk.lab.experiments.networks.gpt import GPT

NUM_TOKENS, HEAD, WARM_UP = 50304, 64, 3
VARIANTS: dict[str, dict[str, Any]] = {
    "no hook": {},
    "attach, Top-k 1 %, 4-bit": {"algorithm": regtopk.TopK(density=0.01, value_code="4bit")},
    "attach, RegTop-k 0.1 %": {"algorithm": regtopk.RegTopK(density=0.001)},
    "attach, Top-k 1 %, 4-bit, residual in bfloat16": {
        "algorithm": regtopk.TopK(density=0.01, value_code="4bit"),
        "residual_dtype": "bfloat16",
    },
}


class Stepper:
    """One variant's model, and a step of it."""

    def __init__(
        self,
        given: dict[str, Any],
        mesh: DeviceMesh,
        device: torch.device,
        options: argparse.Namespace,
        batch: int,
    ) -> None:
        torch.manual_seed(0)
        heads = max(1, options.width // HEAD)
        sizes = {"context": options.context, "width": options.width, "num_layers": options.layers}
        self.model: Any = GPT(NUM_TOKENS, num_heads=heads, **sizes).to(device)
        computes_in = torch.bfloat16 if device.type == "cuda" else None
        policy = MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh["shard"], mp_policy=policy)
        fully_shard(self.model, mesh=mesh["shard"], mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.exchange = None
        if given:
            self.exchange = regtopk.attach(self.model, process_group=mesh["replicate"], **given)
        shape = batch, options.context + 1
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(NUM_TOKENS, shape, generator=generator).to(device)
        self.device = device

    def loss(self) -> torch.Tensor:
        scores = self.model(self.tokens[:, :-1]).float()
        return F.cross_entropy(scores.flatten(0, 1), self.tokens[:, 1:].flatten())

    def step(self) -> float:
        """Seconds of a step."""
        dist.barrier()
        self._wait()
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        self._wait()
        return time.perf_counter() - start

    def syncs(self) -> dict[str, int]:
        """How often each line makes the host wait in a backward."""
        self.optimizer.zero_grad()
        loss = self.loss()
        self._wait()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            loss.backward()
            torch.cuda.set_sync_debug_mode("default")
        lines = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
        return dict(Counter(lines))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def rank_main(
    rank: int, world: int, backend: str, batch: int, options: argparse.Namespace, folder: str
) -> None:
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    if world > 1 and backend == "nccl":
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    mesh = init_device_mesh(device.type, (world, 1), mesh_dim_names=("replicate", "shard"))
    steppers = {name: Stepper(given, mesh, device, options, batch) for name, given in VARIANTS.items()}
    for stepper in steppers.values():
        for _ in range(WARM_UP):
            stepper.step()
    rounds = []
    for number in range(options.rounds):
        names = list(steppers)
        first = number % len(names)  # every variant comes first in turn
        rounds.append({name: steppers[name].step() for name in names[first:] + names[:first]})
    has_syncs = device.type == "cuda" and world == 1
    syncs = {name: stepper.syncs() for name, stepper in steppers.items()} if has_syncs else {}
    if rank == 0:
        numel = sum(p.numel() for p in steppers["no hook"].model.parameters())
        sent = {name: s.exchange.last_step.sent_bytes for name, s in steppers.items() if s.exchange}
        setting = f"{world} x 1, {backend}, {batch} x {options.context} tokens per rank"
        torch.save([setting, numel, rounds, sent, syncs], Path(folder) / "found")
    dist.barrier()
    del steppers, stepper
    gc.collect()
    dist.destroy_process_group()


def measure(world: int, backend: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """One setting."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (world, backend, batch, options, folder), nprocs=world)  # type: ignore[no-untyped-call, attr-defined]
        setting, numel, rounds, sent, syncs = torch.load(Path(folder) / "found", weights_only=True)
    rows = [
        {
            "variant": name,
            "step_s": statistics.median(each[name] for each in rounds),
            "over_no_hook": statistics.median(each[name] / each["no hook"] for each in rounds),
            "sent_bytes": sent.get(name, 0),
            "host_waits_in_backward": syncs.get(name),
        }
        for name in VARIANTS
    ]
    return {"setting": setting, "numel": numel, "results": rows}


def show(report: dict[str, Any]) -> None:
    print(f"{report['hardware']}, torch {report['torch']}, {report['settings'][0]['numel']:,} parameters")
    for setting in report["settings"]:
        print(f"\n| {setting['setting']} | step, ms | over no hook | sent, kB | host waits in backward |")
        print("|---|" + "---:|" * 4)
        for row in setting["results"]:
            waits = row["host_waits_in_backward"]
            text = "" if waits is None else f"{sum(waits.values())}: {waits}"
            numbers = (
                f"{1000 * row['step_s']:.2f} | {row['over_no_hook']:.3f} | {row['sent_bytes'] / 1e3:,.1f}"
            )
            print(f"| {row['variant']} | {numbers} | {text} |")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    is_cuda = options.device.startswith("cuda")
    groups = [(1, "nccl"), (2, "gloo"), (2, "nccl")] if is_cuda else [(1, "gloo"), (2, "gloo")]
    report = {
        "settings": [measure(*group, batch, options) for group in groups for batch in options.batch],
        "hardware": torch.cuda.get_device_name()
        if is_cuda
        else f"{os.cpu_count()} CPUs, {platform.machine()}",
        "torch": torch.__version__,
    }
    give(report, options, show)


if __name__ == "__main__":
    main()
