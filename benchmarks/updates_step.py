"""What does `UpdateExchange` add to a step of a GPT that Muon trains, where the link costs nothing?

A GPT of 124 million parameters (12 layers of width 768) trains on one device: Muon for the blocks' matrices,
AdamW for the rest, in bfloat16 by autocast on a GPU. All variants run in turn, round after round, so their
ratio does not drift with the machine. A round is eight steps, so that each holds whole rounds of every
exchange. Printed is the median over rounds of each round's ratio to no exchange. With one rank
nothing travels, but everything is selected, coded and decoded. More ranks share the device: over gloo on a
CPU, over NCCL on a GPU, where each says that it is a host of its own.

    python benchmarks/updates_step.py [--json] [--out FILE] [--ranks N] [--rounds R] [--batch B]
                                      [--layers L] [--width W] [--context T] [--device cpu]
"""

import argparse
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
from torch.nn import functional as F

import regtopk
from regtopk.lab.experiments.networks.gpt import GPT

NUM_TOKENS, HEAD, WARM_UP = 50304, 64, 3  # the exchange's kernels are captured from the third on
ROUND = 8  # steps: whole rounds of every variant
RECIPE = regtopk.recipes.transformer(2)
TOP = regtopk.TopK(density=0.026, value_code="2bit", impute=0.15)
VARIANTS: dict[str, dict[str, Any] | None] = {
    "no exchange": None,
    "every=4, fragments=4": {"algorithm": TOP, "every": 4, "fragments": 4},
    "every=4": {"algorithm": TOP, "every": 4},
    "every=4, fragments=4, returned": {
        "algorithm": regtopk.TopK(density=0.026, value_code="2bit", returned=0.03),
        "every": 4,
        "fragments": 4,
    },
    "the recipe": {"algorithm": RECIPE.algorithm, **RECIPE.options},
}


class Trainer:
    """One variant's model, and a round of steps of it."""

    def __init__(self, given: dict[str, Any] | None, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        sizes = {"context": options.context, "width": options.width, "num_layers": options.layers}
        model: Any = GPT(NUM_TOKENS, num_heads=max(1, options.width // HEAD), **sizes).to(options.device)
        self.model = model
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
        muon = torch.optim.Muon(matrices, lr=1e-4, adjust_lr_fn="match_rms_adamw")
        self.is_cuda = options.device == "cuda"
        adamw = torch.optim.AdamW(others, lr=1e-4, fused=self.is_cuda)
        self.optimizers = [muon, adamw]
        if given:
            self.exchange = regtopk.UpdateExchange(model, self.optimizers, **given)
        tokens = torch.randint(NUM_TOKENS, (options.batch, options.context + 1))
        self.tokens = tokens.to(options.device)

    def round(self) -> float:
        """Seconds of a step, on the mean of a round."""
        dist.barrier()
        self._wait()
        start = time.perf_counter()
        for _ in range(ROUND):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            with torch.autocast(self.tokens.device.type, torch.bfloat16, enabled=self.is_cuda):
                scores = self.model(self.tokens[:, :-1])
            F.cross_entropy(scores.float().flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
            for optimizer in self.optimizers:
                optimizer.step()
        self._wait()
        return (time.perf_counter() - start) / ROUND

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    if options.device == "cuda":
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // options.ranks))
    backend, store = "nccl" if options.device == "cuda" else "gloo", f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=options.ranks)
    trainers = {name: Trainer(given, options) for name, given in VARIANTS.items()}
    for _ in range(WARM_UP):
        for trainer in trainers.values():
            trainer.round()
    rounds, names = [], list(trainers)
    for number in range(options.rounds):
        first = number % len(names)  # every variant comes first in turn
        rounds.append({name: trainers[name].round() for name in names[first:] + names[:first]})
    if rank == 0:
        numel = sum(p.numel() for p in trainers["no exchange"].model.parameters())
        torch.save([numel, rounds], Path(folder) / "found")
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (options, folder), nprocs=options.ranks)  # type: ignore[no-untyped-call, attr-defined]
        numel, rounds = torch.load(Path(folder) / "found", weights_only=True)
    rows = []
    for name in VARIANTS:
        ratios = [each[name] / each["no exchange"] for each in rounds]
        step_s = statistics.median(each[name] for each in rounds)
        rows.append({"variant": name, "step_s": step_s, "over_no_exchange": statistics.median(ratios)})
    is_cuda = options.device == "cuda"
    hardware = torch.cuda.get_device_name() if is_cuda else f"{os.cpu_count()} CPUs, {platform.machine()}"
    tokens = {"batch": options.batch, "context": options.context}
    found = {"numel": numel, "ranks": options.ranks, "rounds": options.rounds, **tokens, "results": rows}
    return found | {"hardware": hardware, "torch": torch.__version__}


def show(report: dict[str, Any]) -> None:
    print(f"{report['hardware']}, torch {report['torch']}, {report['numel']:,} parameters,", end=" ")
    print(f"{report['batch']} x {report['context']} tokens on each of {report['ranks']} ranks\n")
    print("| | step, ms | over no exchange |\n|---|---:|---:|")
    for row in report["results"]:
        print(f"| {row['variant']} | {1e3 * row['step_s']:.2f} | {row['over_no_exchange']:.3f} |")


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the device: %(default)s")
    parser.add_argument("--rounds", type=int, default=12, help="that count: %(default)s")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    give(measure(options), options, show)


if __name__ == "__main__":
    main()
