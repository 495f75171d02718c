"""What does a simulated training step of a deep network cost, and what do parallel branches gain?

N workers' forward and backward passes of a network, on random images: one after another without a graph,
captured in one CUDA graph one after another, and as 2, 4 and 8 parallel branches of it; in float32 (TF32
convolutions) and bfloat16. Beside it: the exchange by each method in the simulator, and one evaluation of
10,000 images. Milliseconds of all models together, medians over rounds.

    python benchmarks/deep_step.py [--device cuda] [--networks NAME ...] [--models R] [--workers N]
                                   [--batch B] [--compiled]
                                   [--branches M ...] [--precisions P ...] [--methods M ...] [--rounds R]
                                   [--json] [--out FILE]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regtopk.lab.experiments.compare.comparison import hardware
from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.networks.convolutional import NETWORKS
from regtopk.lab.experiments.networks.engine import Engine
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.method import Method
from regtopk.simulate import Cluster

WARM_UP = 3


def random_examples(device: str) -> Examples:
    generator = torch.Generator().manual_seed(0)
    train, test = (torch.randn(n, 32, 32, 3, generator=generator).to(device) for n in (5_000, 10_000))
    labels, test_labels = (torch.randint(10, (n,), generator=generator) for n in (5_000, 10_000))
    return Examples(train, labels.to(device), test, test_labels.to(device), labels, 10)


def milliseconds(step: Callable[[], Any], rounds: int, device: str, inner: int = 5) -> float:
    """Median over rounds of `inner` steps in a row."""
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(rounds):
        _wait(device)
        start = time.perf_counter()
        for _ in range(inner):
            step()
        _wait(device)
        times.append((time.perf_counter() - start) / inner * 1e3)
    return statistics.median(times)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    examples = random_examples(args.device)
    rows = torch.randint(5_000, (args.models, args.workers, args.batch), device=args.device)
    results = []
    for name in args.networks:
        network = NETWORKS[name](10)
        params = flatten(network).to(args.device).repeat(args.models, 1)
        for precision in args.precisions:
            for branches in args.branches:
                engine = Engine(
                    network,
                    examples,
                    num_models=args.models,
                    num_workers=args.workers,
                    batch_size=args.batch,
                    dtype=getattr(torch, precision),
                    num_branches=branches * args.models,
                    is_compiled=args.compiled,
                )
                step_ms = milliseconds(partial(engine.grads, params, rows), args.rounds, args.device)
                row = {"network": name, "precision": precision, "branches": branches, "passes_ms": step_ms}
                if branches == args.branches[-1]:
                    evaluate = partial(engine.evaluate, params)
                    row["evaluation_ms"] = milliseconds(evaluate, args.rounds, args.device, inner=1)
                results.append(row)
                print(row, file=sys.stderr, flush=True)
        grads = engine.grads(params, rows)[0]
        for label in args.methods:
            method = Method.parse(label)
            cluster = Cluster(
                method.build(density=0.001, value_code="float32"),
                num_workers=args.workers,
                layout=engine.layout,
                index_code=method.index_code or "elias-fano",
                is_checked=False,
            )
            row = {
                "network": name,
                "method": label,
                "exchange_ms": milliseconds(
                    partial(cluster.step, grads.squeeze(0)), args.rounds, args.device
                ),
            }
            results.append(row)
            print(row, file=sys.stderr, flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--networks", nargs="+", default=["resnet18", "resnet18-gn"])
    parser.add_argument("--models", type=int, default=1)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--branches", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--methods", nargs="+", default=["dense", "topk", "regtopk"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    found = {
        "command": f"benchmarks/deep_step.py {' '.join(sys.argv[1:])}".strip(),
        "hardware": hardware(args.device),
        "torch": torch.__version__,
        "results": measure(args),
    }
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n")
    if args.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
