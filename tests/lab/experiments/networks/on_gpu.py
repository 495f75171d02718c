"""Deep trainings on a real GPU: graphs, exactness, and that the host does not wait.

`pytest -m gpu` runs all of it, and so does `python -m tests.lab.experiments.networks.on_gpu`, without pytest.
"""

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from regtopk.lab.experiments.compare.config import CompareConfig, MethodAt
from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.networks.convolutional import NETWORKS
from regtopk.lab.experiments.networks.engine import Engine
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.experiments.paper.fig3 import FIG3, PRESETS
from regtopk.lab.experiments.tasks import Problem, Task, deep
from regtopk.lab.experiments.training.trainer import Trainer
from regtopk.lab.runs import read_records

DEVICE = "cuda"
MEASURED = ("method", "seed", "step", "accuracy", "test_loss", "loss", "payload_bytes")
SMOKE = CompareConfig(**{**PRESETS["smoke"], "device": DEVICE})


def random_examples(num: int = 200) -> Examples:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num, 32, 32, 3, generator=generator).to(DEVICE)
    labels = torch.randint(10, (num,), generator=generator)
    return Examples(images, labels.to(DEVICE), images[:50], labels[:50].to(DEVICE), labels, 10)


def a_graph_computes_what_plain_calls_do() -> None:
    """With parallel branches, for several models, with weights of their own or not; and again on new rows."""
    examples = random_examples()
    for name in ("small-cnn", "resnet18", "resnet18-gn"):
        torch.manual_seed(0)
        network = NETWORKS[name](10)
        params = flatten(network).to(DEVICE).repeat(2, 1)
        params[1] *= 1.01
        for has_own_weights in (False, True):
            given = params.unsqueeze(1).repeat(1, 4, 1) if has_own_weights else params
            plain, graph = (
                Engine(
                    network, examples, num_models=2, num_workers=4, batch_size=5, num_branches=branches,
                    has_own_weights=has_own_weights,
                )
                for branches in (0, 8)
            )  # fmt: skip
            for seed in range(3):
                rows = torch.randint(200, (2, 4, 5), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
                (expected, losses), (found, found_losses) = plain.grads(given, rows), graph.grads(given, rows)
                torch.testing.assert_close(found_losses, losses, rtol=1e-3, atol=1e-3)
                error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
                assert float(error.max()) < 0.02, (name, error)  # TF32, and other kernels in a graph


def measured(config: CompareConfig, folder: Path) -> list[tuple[object, ...]]:
    FIG3.record(config, folder, command="regtopk reproduce fig3")
    return [tuple(r[name] for name in MEASURED) for r in read_records(folder)]


def deterministic_runs_are_the_same_bits() -> None:
    methods = "dense,topk,regtopk:mu=1,dgc,consensus:value_code=4bit,global-topk,randomk,sketch"
    config = replace(SMOKE, deterministic=True, algorithms=methods, num_steps=30, num_evaluations=6)
    with TemporaryDirectory() as folder:
        first, again = (measured(config, Path(folder) / name) for name in ("first", "again"))
    assert first == again


def steps_never_wait_for_the_device() -> None:
    config = replace(SMOKE, algorithms="dense,topk,regtopk:mu=1,dgc,consensus")
    check_never_waits(config, Problem(config).task([0]))


def check_never_waits(config: CompareConfig, task: Task) -> None:
    for method in config.methods:
        trainer = Trainer(task, config.build(MethodAt(method, 0.01)), method, lr=0.004, num_steps=8)
        trainer.run_until(4)
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer.run_until(8)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def make_gpts(folder: str, **settings: Any) -> tuple[CompareConfig, Task]:
    """A small GPT on characters drawn at random, two seeds of it."""
    path = Path(folder) / "text"
    drawn = torch.randint(32, 127, (40_000,), generator=torch.Generator().manual_seed(0))
    path.write_text("".join(map(chr, drawn.tolist())))
    config = CompareConfig(
        task="gpt", data=str(path), device=DEVICE, num_workers=4, num_steps=8, batch_size=4, num_layers=2,
        width=128, context=64, **settings,
    )  # fmt: skip
    return config, Problem(config).task([0, 1])


def workers_with_models_of_their_own_are_the_same_in_a_graph() -> None:
    with TemporaryDirectory() as folder:
        for precision in ("float32", "bfloat16"):
            (_, task), (_, plain) = (make_gpts(folder, precision=precision) for _ in range(2))
            models = task.start().unsqueeze(1).repeat(1, 4, 1)
            models *= 1 + 0.01 * torch.arange(4, device=DEVICE).view(1, 4, 1)
            with patch.object(deep, "NUM_BRANCHES", 0):
                expected = [[x.clone() for x in plain.grads(models, step)] for step in range(3)]
            for step, (grads, losses) in enumerate(expected):
                found, found_losses = task.grads(models, step)
                torch.testing.assert_close(found_losses, losses, rtol=1e-3, atol=1e-3)
                error = (found - grads).norm(dim=-1) / grads.norm(dim=-1)
                assert float(error.max()) < 0.02, (precision, error)


def updates_never_wait_for_the_device() -> None:
    updates = "topk:value_code=4bit:exchange=updates:every=2,dense:exchange=updates:every=4:outer=nesterov"
    with TemporaryDirectory() as folder:
        check_never_waits(*make_gpts(folder, algorithms=f"dense,topk,{updates}", precision="bfloat16"))


CHECKS = (
    a_graph_computes_what_plain_calls_do,
    deterministic_runs_are_the_same_bits,
    steps_never_wait_for_the_device,
    workers_with_models_of_their_own_are_the_same_in_a_graph,
    updates_never_wait_for_the_device,
)


def main() -> None:
    for check in CHECKS:
        start = time.perf_counter()
        check()
        print(f"ok  {check.__name__}  {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
