"""Deep trainings on a real GPU: graphs, exactness, and that the host does not wait."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from regtopk.lab.experiments.compare.config import CompareConfig, MethodAt
from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.networks.convolutional import NETWORKS
from regtopk.lab.experiments.networks.engine import Engine
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.experiments.paper.fig3 import PRESETS
from regtopk.lab.experiments.tasks import Problem, Task, deep
from regtopk.lab.experiments.training.trainer import Trainer
from tests.lab.experiments.compare.test_slices import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Found = tuple[Tensor, Tensor]  # gradients and losses


def check_close(found: Found, expected: Found) -> None:
    """But for TF32, and other kernels in a graph."""
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-3)
    error = (found[0] - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1)
    assert float(error.max()) < 0.02, error


@pytest.mark.parametrize("has_own_weights", [False, True])
@pytest.mark.parametrize("name", ["small-cnn", "resnet18", "resnet18-gn"])
def test_a_graph_computes_what_plain_calls_do(name: str, has_own_weights: bool) -> None:
    """With parallel branches, for several models; and again on new rows."""
    torch.manual_seed(0)
    images, labels = torch.randn(200, 32, 32, 3).cuda(), torch.randint(10, (200,))
    examples = Examples(images, labels.cuda(), images[:50], labels[:50].cuda(), labels, 10)
    network = NETWORKS[name](10)
    params = flatten(network).cuda().repeat(2, 1)
    params[1] *= 1.01
    given = params.unsqueeze(1).repeat(1, 4, 1) if has_own_weights else params
    sizes: dict[str, Any] = {"num_models": 2, "num_workers": 4, "batch_size": 5}
    sizes["has_own_weights"] = has_own_weights
    plain, graph = (Engine(network, examples, num_branches=branches, **sizes) for branches in (0, 8))
    for _ in range(3):
        rows = torch.randint(200, (2, 4, 5)).cuda()
        check_close(graph.grads(given, rows), plain.grads(given, rows))


def test_deterministic_runs_are_the_same_bits(tmp_path: Path) -> None:
    methods = "dense,topk,regtopk:mu=1,dgc,consensus:value_code=4bit,global-topk,randomk,sketch"
    smoke = CompareConfig(**{**PRESETS["smoke"], "device": "cuda"})
    config = replace(smoke, deterministic=True, algorithms=methods, num_steps=30, num_evaluations=6)
    assert run(config, tmp_path / "first") == run(config, tmp_path / "again")


def make_gpts(folder: Path, **settings: Any) -> tuple[CompareConfig, Task]:
    """A small GPT on characters drawn at random, two seeds of it."""
    drawn = torch.randint(32, 127, (40_000,), generator=torch.Generator().manual_seed(0))
    (folder / "text").write_text("".join(map(chr, drawn.tolist())))
    config = CompareConfig(
        task="gpt", data=str(folder / "text"), device="cuda", num_workers=4, num_steps=8, batch_size=4,
        num_layers=2, width=128, context=64, **settings,
    )  # fmt: skip
    return config, Problem(config).task([0, 1])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_workers_with_models_of_their_own_are_the_same_in_a_graph(tmp_path: Path, precision: str) -> None:
    (_, task), (_, plain) = (make_gpts(tmp_path, precision=precision) for _ in range(2))
    models = task.start().unsqueeze(1).repeat(1, 4, 1)
    models *= 1 + 0.01 * torch.arange(4, device="cuda").view(1, 4, 1)
    with patch.object(deep, "NUM_BRANCHES", 0):
        expected = [[x.clone() for x in plain.grads(models, step)] for step in range(3)]
    for step, (grads, losses) in enumerate(expected):
        check_close(task.grads(models, step), (grads, losses))


def test_steps_never_wait_for_the_device(tmp_path: Path) -> None:
    smoke = {**PRESETS["smoke"], "algorithms": "dense,topk,regtopk:mu=1,dgc,consensus", "device": "cuda"}
    images = CompareConfig(**smoke)
    updates = "topk:value_code=4bit:exchange=updates:every=2,dense:exchange=updates:every=4:outer=nesterov"
    muon = "dense:optimizer=muon,topk:exchange=updates:every=4:fragments=2:optimizer=muon"
    gpts = make_gpts(tmp_path, algorithms=f"dense,topk,{updates},{muon}", precision="bfloat16")
    for config, task in ((images, Problem(images).task([0])), gpts):
        for method in config.methods:
            trainer = Trainer(task, config.build(MethodAt(method, 0.01)), method, lr=0.004, num_steps=8)
            trainer.run_until(4)
            torch.cuda.set_sync_debug_mode("error")
            try:
                trainer.run_until(8)
            finally:
                torch.cuda.set_sync_debug_mode("default")
