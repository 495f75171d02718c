"""What does a training step cost with each way to exchange gradients, and where does our time go?

N processes on this machine, joined by gloo over loopback, take the same step (forward, backward with DDP,
SGD) of a chain of linear layers whose own work is small: no hook, torch's fp16 hook, torch's PowerSGD (in
one bucket: with several it hangs on gloo), and Top-k and RegTop-k, these also with plain torch instead of our
kernels: before and after. "updates" has no DDP: it exchanges what SGD changed, after every step. All variants
run in turn, round after round; a step's time is that of the slowest rank, its CPU time the mean over ranks.
Times of a shared machine drift, so what is printed is the median over rounds of each round's ratio to no
hook. On loopback bytes cost next to nothing: this measures what an exchange costs in work, not what it saves
on a network.

    python benchmarks/ddp_step.py [--json] [--out FILE] [--workers N] [--rounds R] [--density S]
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk.distributed.requests.record import PHASES

WIDTH, DEPTH, BATCH = 965, 12, 4  # 11,186,280 parameters
ONE_BUCKET_MB = 1000
PLAIN = ", plain torch"  # the end of a variant's name
WARM_UP = 3


Wrap = Callable[[nn.Module, torch.optim.Optimizer], Any]


def variants(density: float) -> dict[str, Wrap]:
    """From a name to what wraps and hooks the model; returns the model and our exchange, if it is ours."""
    table: dict[str, Wrap] = {
        "no hook": lambda net, optimizer: (DistributedDataParallel(net), None),
        "torch fp16": with_fp16,
        "torch PowerSGD": with_powersgd,
    }
    for code in ("float32", "4bit"):
        for name, kind in (("Top-k", regtopk.TopK), ("RegTop-k", regtopk.RegTopK)):
            table[f"{name}, model, {code}"] = with_ours(kind(density=density, value_code=code))
            table[f"{name}, updates, {code}"] = with_updates(kind(density=density, value_code=code))
    for name in ("Top-k", "RegTop-k"):
        table[f"{name}, model, float32{PLAIN}"] = table[f"{name}, model, float32"]
    return table


def with_fp16(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model, None


def with_powersgd(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    model = DistributedDataParallel(net, bucket_cap_mb=ONE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model, None


def with_ours(algorithm: Any) -> Wrap:
    def wrap(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        model = DistributedDataParallel(net)
        return model, regtopk.attach(model, algorithm)

    return wrap


def with_updates(algorithm: Any) -> Wrap:
    def wrap(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return net, regtopk.UpdateExchange(net, optimizer, algorithm)

    return wrap


class Stepper:
    """One variant's model, and a step of it."""

    def __init__(self, wrap: Wrap, kernels: str) -> None:
        self.kernels = kernels
        torch.manual_seed(0)
        layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        net = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        self.model, self.exchange = wrap(net, self.optimizer)
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> dict[str, float]:
        """Seconds of a step, and of our phases in it."""
        x = torch.randn(BATCH, WIDTH, generator=self.generator)
        os.environ["REGTOPK_KERNELS"] = self.kernels
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        self.optimizer.zero_grad()
        self.model(x).square().sum().backward()
        self.optimizer.step()
        times = {"step_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu_start}
        if self.exchange is not None:
            last = self.exchange.last_step
            times |= {phase: getattr(last, phase) for phase in PHASES}
        return times


def rank_main(rank: int, options: argparse.Namespace, store: str, answer: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.workers))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.workers)
    steppers = {
        name: Stepper(wrap, "reference" if name.endswith(PLAIN) else "auto")
        for name, wrap in variants(options.density).items()
    }
    for stepper in steppers.values():
        for _ in range(WARM_UP):
            stepper.step()
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds):
        names = list(steppers)
        first = number % len(names)  # every variant comes first once
        rounds.append({name: slowest(steppers[name].step()) for name in names[first:] + names[:first]})
    sent = {name: s.exchange.last_step.sent_bytes for name, s in steppers.items() if s.exchange is not None}
    if rank == 0:
        answer.put((rounds, sent, sum(p.numel() for p in steppers["no hook"].model.parameters())))
    dist.barrier()
    dist.destroy_process_group()


def slowest(times: dict[str, float]) -> dict[str, float]:
    """The step of the slowest rank; CPU time and our phases as means over ranks."""
    values = torch.tensor(list(times.values()), dtype=torch.float64)
    longest = values[:1].clone()
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    dist.all_reduce(values)
    means = dict(zip(times, (values / dist.get_world_size()).tolist(), strict=True))
    return {**means, "step_s": float(longest)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    context = mp.get_context("spawn")
    answer = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            rank_main, (options, store, answer), nprocs=options.workers, join=False
        )
        while not ranks.join(timeout=1):
            pass
    rounds, sent, numel = answer.get()
    results = []
    for name in rounds[0]:
        median = {key: statistics.median(r[name][key] for r in rounds) for key in rounds[0][name]}
        row = {"variant": name, **median, "sent_bytes": sent.get(name)}
        for key in ("step_s", "cpu_s"):
            row[f"{key}_over_no_hook"] = against(rounds, name, "no hook", key)
            if name.endswith(PLAIN):
                row[f"{key}_over_ours"] = against(rounds, name, name.removesuffix(PLAIN), key)
            if "updates" in name:
                row[f"{key}_over_attach"] = against(rounds, name, name.replace("updates", "model"), key)
            if name.startswith("Reg"):
                row[f"{key}_over_topk"] = against(rounds, name, name.removeprefix("Reg"), key)
        results.append(row)
    return {
        "command": f"benchmarks/ddp_step.py --workers {options.workers} --rounds {options.rounds} "
        f"--density {options.density}",
        "numel": numel,
        "num_cpus": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "results": results,
    }


def against(rounds: list[dict[str, dict[str, float]]], name: str, other: str, key: str) -> float:
    """The median over rounds of a variant's time over another's in the same round."""
    return statistics.median(r[name][key] / r[other][key] for r in rounds)


def table(report: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = [
        "# The work of an exchange, on loopback",
        "",
        f"J = {report['numel']:,}, {report['num_cpus']} CPUs ({report['machine']}), torch {report['torch']}:"
        f" `python {report['command']}`",
        "",
        "Step and CPU time as multiples of no hook's; our phases as shares of the step.",
        "",
        "| variant | step | CPU | step, over Top-k | CPU, over Top-k | select | encode | collective | decode "
        "| sent |",
        "|---|" + "---:|" * 9,
    ]
    for row in report["results"]:
        over = [f"{row[f'{key}_over_no_hook']:.2f}" for key in ("step_s", "cpu_s")]
        for key in ("step_s_over_topk", "cpu_s_over_topk"):
            over.append(f"{100 * (row[key] - 1):+.1f} %" if key in row else "")
        shares = [f"{100 * row[phase] / row['step_s']:.1f} %" if phase in row else "" for phase in PHASES]
        sent = f"{row['sent_bytes'] / 1e3:,.1f} kB" if row["sent_bytes"] else ""
        lines.append(f"| {' | '.join([row['variant'], *over, *shares, sent])} |")
    lines.append("")
    for row in report["results"]:
        if row["variant"].endswith(PLAIN):
            lines.append(f"{row['variant']}: {row['step_s_over_ours']:.2f} times the step with our kernels.")
        if "updates" in row["variant"]:
            attached = row["variant"].replace("updates", "model")
            ratios = (
                f"{row['step_s_over_attach']:.2f} times the step, {row['cpu_s_over_attach']:.2f} the CPU time"
            )
            lines.append(f"{row['variant']}: {ratios} of {attached}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, help="write the JSON here, and a table beside it as .md")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=34, help="twice every variant's turn to be first")
    parser.add_argument("--density", type=float, default=0.001)
    options = parser.parse_args()
    report = run(options)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        options.out.with_suffix(".md").write_text(table(report) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2) if options.json else table(report))


if __name__ == "__main__":
    main()
