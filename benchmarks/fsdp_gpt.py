"""What does a sharded GPT send between its replicas, and what does it learn, against torch's own HSDP?

Four processes of this machine, joined by gloo, are 2 replicas of 2 shards. They train the GPT of `regtopk
compare gpt` (6 layers of width 256, 4.8 million parameters) on torch's sources with AdamW: by torch's HSDP
on a mesh of two dimensions, which averages gradients in bfloat16, and by `regtopk.UpdateExchange` over the
replicate axis. Both reduce over the shard axis in bfloat16, see the same windows in the same order, and
search the same learning rates on seed 0, which is not counted, in shorter runs. The losses are of other
seeds, on the same test windows. --out is written after every seed: a long run may be stopped, and --go-on
takes over the runs of its report.

Bytes are those that cross the replicate axis, all four ranks added up, by our own counts: of HSDP 2(N-1)/N
vectors of a rank's padded part in bfloat16 a step, as a ring all-reduce sends them; of UpdateExchange what
`exchange.total.sent_bytes` counts. Interface counters could not tell the two axes apart on one machine.

    python benchmarks/fsdp_gpt.py [--json] [--out FILE] [--seeds S] [--threads N] [--batch B] [--window W]
                                  [--go-on FILE]
"""

import argparse
import json
import math
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from reporting import give, parser_for
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import regtopk
from regtopk.core.traffic import all_reduce_bytes
from regtopk.lab.experiments.data.text import Text, load_text
from regtopk.lab.experiments.networks.gpt import GPT

REPLICAS, SHARDS = 2, 2
CONTEXT = 128  # of the model, whose default that is; the windows may be shorter
WARM_UP, CLIP = 30, 1.0
METHODS = ("hsdp", "updates")
POLICY = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


def sharded_gpt(num_tokens: int, mesh: DeviceMesh, seed: int) -> Any:
    torch.manual_seed(seed)
    model = GPT(num_tokens, context=CONTEXT, width=256, num_layers=6, num_heads=4)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICY)
    return fully_shard(model, mesh=mesh, mp_policy=POLICY)


def loss_of(model: nn.Module, text: Tensor, starts: Tensor, length: int) -> Tensor:
    """The mean loss of the next character over windows of a text."""
    windows = text[starts.unsqueeze(1) + torch.arange(length + 1)]
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def scale_of(step: int, num_steps: int) -> float:
    """The learning rate of a step: it grows, then follows a cosine down to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, num_steps - WARM_UP)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def train(
    method: str, lr: float, seed: int, num_steps: int, options: argparse.Namespace, text: Text
) -> dict[str, Any]:
    """One run: its test loss, and the bytes of all ranks."""
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard"))
    model = sharded_gpt(text.vocabulary_size, mesh if method == "hsdp" else mesh["shard"], seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: scale_of(step, num_steps))
    exchange = None
    if method == "updates":
        topk = regtopk.TopK(density=options.density, value_code="4bit")
        exchange = regtopk.UpdateExchange(
            model,
            optimizer,
            topk,
            every=options.every,
            fragments=options.fragments,
            process_group=mesh["replicate"],
        )
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    start = time.perf_counter()
    for _ in range(num_steps):
        starts = torch.randint(len(text.train) - options.window, (options.batch,), generator=generator)
        optimizer.zero_grad()
        loss_of(model, text.train, starts, options.window).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - start
    mine = native_bytes(model) * num_steps if exchange is None else exchange.total.sent_bytes
    sent = torch.tensor(mine)
    dist.all_reduce(sent)
    found = {"method": method, "lr": lr, "seed": seed, "num_steps": num_steps, "sent_bytes": int(sent)}
    return {**found, "loss": test_loss(model, text.test, options), "train_s": round(seconds, 1)}


def native_bytes(model: Any) -> int:
    """What an all-reduce of this rank's part in bfloat16 sends, with FSDP's padding."""
    rows = [-(-p.shape[0] // SHARDS) * p.shape[1:].numel() for p in model.parameters()]
    return int(all_reduce_bytes(2 * sum(rows), REPLICAS))


@torch.no_grad()
def test_loss(model: nn.Module, text: Tensor, options: argparse.Namespace) -> float:
    """Of windows that are evenly spread over the test part, every rank a share of them."""
    places = torch.linspace(0, len(text) - options.window - 1, options.tested).long()
    mine = places[dist.get_rank() :: dist.get_world_size()]
    losses = [loss_of(model, text, part, options.window) for part in mine.split(32)]
    total = torch.stack(losses).mean()
    dist.all_reduce(total)
    return float(total / dist.get_world_size())


def rank_main(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(options.threads)
    world = REPLICAS * SHARDS
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    text = load_text(None, window=CONTEXT + 1)
    before = runs_before(options, text)
    runs: list[dict[str, Any]] = []

    def run(method: str, lr: float, seed: int, num_steps: int) -> dict[str, Any]:
        found = before.get((method, lr, seed)) or train(method, lr, seed, num_steps, options, text)
        runs.append(found)
        return found

    best = {}
    for method in METHODS:
        found = [run(method, lr, 0, options.search_steps) for lr in options.lr]
        best[method] = min(found, key=lambda each: each["loss"])["lr"]
    for seed in range(1, options.seeds + 1):
        for method in METHODS:
            run(method, best[method], seed, options.steps)
        if rank == 0:
            give(report_of(runs, best, options, text), options, show)
    dist.barrier()
    dist.destroy_process_group()


def settings_of(options: argparse.Namespace, text: Text) -> dict[str, Any]:
    """What two reports must have the same to be one."""
    settings = ("steps", "search_steps", "batch", "window", "tested", "density", "every", "fragments")
    return {key: getattr(options, key) for key in settings} | {"text_sha256": text.sha256}


def runs_before(options: argparse.Namespace, text: Text) -> dict[tuple[str, float, int], dict[str, Any]]:
    """The runs of an earlier report, by method, learning rate and seed."""
    if options.go_on is None:
        return {}
    report, settings = json.loads(options.go_on.read_text()), settings_of(options, text)
    if report["settings"] != settings:
        raise SystemExit(f"{options.go_on} must have the settings {settings}, got {report['settings']}")
    return {(run["method"], run["lr"], run["seed"]): run for run in report["runs"]}


def report_of(
    runs: list[dict[str, Any]], best: dict[str, float], options: argparse.Namespace, text: Text
) -> dict[str, Any]:
    native, ours = ([r for r in runs if r["method"] == method and r["seed"] > 0] for method in METHODS)
    behind = [our["loss"] - its["loss"] for our, its in zip(ours, native, strict=True)]
    return {
        "settings": settings_of(options, text),
        "bytes_counted": "by the formula of a ring all-reduce (hsdp), by the exchange's own counts (updates)",
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}",
        "torch": torch.__version__,
        "lr": best,
        "loss": {
            m: statistics.mean(r["loss"] for r in of) for m, of in zip(METHODS, (native, ours), strict=True)
        },
        "nats_behind_hsdp": {"mean": statistics.mean(behind), "by_seed": behind},
        "times_fewer_bytes": sum(r["sent_bytes"] for r in native) / sum(r["sent_bytes"] for r in ours),
        "runs": runs,
    }


def show(report: dict[str, Any]) -> None:
    for method in METHODS:
        print(f"{method:8} lr {report['lr'][method]:g}, test loss {report['loss'][method]:.4f} nats")
    behind = report["nats_behind_hsdp"]
    seeds = ", ".join(f"{each:+.4f}" for each in behind["by_seed"])
    print(f"updates end {behind['mean']:+.4f} nats behind ({seeds}), with 1/", end="")
    print(f"{report['times_fewer_bytes']:.1f} of the bytes over the replicate axis")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many are counted")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.001, 0.002, 0.004, 0.008])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--search-steps", type=int, default=80, help="of a run that tries a learning rate")
    parser.add_argument("--threads", type=int, default=1, help="of each of the four processes")
    parser.add_argument("--batch", type=int, default=4, help="windows of a rank and step")
    parser.add_argument("--window", type=int, default=32, help="characters that a window predicts")
    parser.add_argument("--tested", type=int, default=2048, help="windows of the test part")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--go-on", type=Path, metavar="FILE", help="an earlier report, of the same settings")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.start_processes(rank_main, (options, store), nprocs=REPLICAS * SHARDS)  # type: ignore[no-untyped-call, attr-defined]


if __name__ == "__main__":
    main()
