"""`compare gpt`: against plain torch loops, at equal bytes, resumed, and what is refused."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.lab.experiments.compare.config import CompareConfig, MethodAt
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.experiments.tasks import Problem
from regtopk.lab.experiments.tasks.deep import Gpt
from regtopk.lab.experiments.training.optimizers import OPTIMIZERS, recipe_of
from regtopk.lab.experiments.training.trainer import Trainer
from regtopk.lab.method import Method
from regtopk.lab.report import write_report
from regtopk.lab.runs import read_records
from tests.lab.experiments.compare import test_compare

pytestmark = pytest.mark.usefixtures("small_products")
TINY: dict[str, Any] = {
    "task": "gpt", "num_workers": 4, "num_steps": 10, "batch_size": 2, "num_layers": 2, "width": 16,
    "context": 16, "num_evaluations": 3,
}  # fmt: skip
SHORT: dict[str, Any] = {"num_steps": 8, "num_evaluations": 1}
compare: Any = partial(test_compare.compare, **TINY)


def trained(method: str, text_file: str) -> tuple[Gpt, Tensor]:
    """The task, and where a method of the product ends."""
    config = CompareConfig(**TINY, data=text_file, algorithms=method)
    task = Problem(config).task([0])
    assert isinstance(task, Gpt)
    own = config.methods[0]
    algorithm = config.build(MethodAt(own, None))
    trainer = Trainer(task, algorithm, own, lr=config.lr[0], num_steps=config.num_steps)
    trainer.run_until(config.num_steps)
    return task, trainer.models[0]


def adamw(
    network: nn.Module, beta2: float = 0.95
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """As one writes it with torch."""
    parameters = list(network.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.004, betas=(0.9, beta2))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 100)


def backward(network: nn.Module, task: Gpt, step: int, worker: int) -> None:
    rows = task.order[step, 0, worker]
    scores = network(task.examples.train[rows])
    F.cross_entropy(scores.flatten(0, 1), task.examples.train_targets[rows].flatten()).backward()


def mean_grads(network: nn.Module, task: Gpt, step: int) -> None:
    network.zero_grad()
    for worker in range(4):
        backward(network, task, step, worker)
    for parameter in network.parameters():
        assert parameter.grad is not None
        parameter.grad /= 4


@pytest.mark.parametrize(("words", "beta2"), [("", 0.95), (":beta2=0.5", 0.5)])
def test_dense_gradients_are_a_plain_loop_with_adamw(words: str, beta2: float, text_file: str) -> None:
    task, found = trained(f"dense{words}", text_file)
    network = Gpt.make_network(task.config, task.examples, seed=0)
    optimizer, schedule = adamw(network, beta2)
    for step in range(TINY["num_steps"]):
        mean_grads(network, task, step)
        assert nn.utils.clip_grad_norm_(network.parameters(), 1.0) > 1  # so that clipping is looked at
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(found, flatten(network), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("words", "every", "outer"),
    [
        ("every=1", 1, None),
        ("every=2:outer=nesterov", 2, {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        ("every=2:outer=nesterov:outer_lr=1:outer_momentum=0", 2, None),  # plain averaging
        ("every=5:outer=sgd:outer_lr=0.5:outer_momentum=0.25", 5, {"lr": 0.5, "momentum": 0.25}),
    ],
)
def test_updates_are_a_plain_loop_of_workers_with_their_own_adamw(
    words: str, every: int, outer: dict[str, Any] | None, text_file: str
) -> None:
    task, found = trained(f"dense:exchange=updates:{words}", text_file)
    shared = Gpt.make_network(task.config, task.examples, seed=0)
    outer_optimizer = torch.optim.SGD(shared.parameters(), **(outer or {"lr": 1.0}))
    workers = [Gpt.make_network(task.config, task.examples, seed=0) for _ in range(4)]
    optimizers = [adamw(network) for network in workers]
    for step in range(TINY["num_steps"]):
        for worker, (network, (optimizer, schedule)) in enumerate(zip(workers, optimizers, strict=True)):
            optimizer.zero_grad()
            backward(network, task, step, worker)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        if (step + 1) % every == 0:
            for parameter, *own in zip(shared.parameters(), *(w.parameters() for w in workers), strict=True):
                parameter.grad = parameter.detach() - torch.stack([p.detach() for p in own]).mean(0)
            outer_optimizer.step()
            for network in workers:
                network.load_state_dict(shared.state_dict())
    torch.testing.assert_close(found, flatten(shared), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("words", "decay"), [("", 0.1), (":weight_decay=0", 0.0), (":weight_decay=2", 2.0)])
def test_sgdw_decays_matrices_and_clips_nothing(words: str, decay: float, text_file: str) -> None:
    """As DeMo needs it, whose aggregate is a vector of signs."""
    task, found = trained(f"dense:optimizer=sgdw{words}", text_file)
    network = Gpt.make_network(task.config, task.examples, seed=0)
    for step in range(TINY["num_steps"]):
        lr = 0.004 * (step + 1) / 100
        mean_grads(network, task, step)
        with torch.no_grad():
            for p in network.parameters():
                assert p.grad is not None
                p.mul_(1 - lr * decay * (p.dim() > 1)).sub_(p.grad, alpha=lr)
    torch.testing.assert_close(found, flatten(network), rtol=1e-5, atol=1e-6)


def test_beta2_may_be_zero() -> None:
    optimizer = recipe_of(Method.parse("dense:optimizer=muon:beta2=0")).make([torch.zeros(1)], lr=0.1)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    share = OPTIMIZERS["adamw"].lr_share
    assert share(0, 1536) == 0.01 and share(99, 1536) == share(100, 1536) == 1.0
    assert share(818, 1536) == pytest.approx(0.55) and share(1535, 1536) == pytest.approx(0.1, rel=1e-4)
    assert OPTIMIZERS["sgd"].lr_share(7, 0) == 1.0


def test_updates_of_plain_sgd_are_its_gradients(tmp_path: Path) -> None:
    """On a task whose network torch.func differentiates: after each step, the mean of the models."""
    test_compare.compare(tmp_path, algorithms="dense,dense:exchange=updates", num_evaluations=1)
    losses = [r["loss"] for r in read_records(tmp_path)]
    assert losses[1] == pytest.approx(losses[3], rel=1e-5) and losses[1] < losses[0]


def test_bytes_are_counted_by_local_steps(tmp_path: Path, text_file: str) -> None:
    methods = "dense,dense:exchange=updates:every=4,topk:value_code=4bit:exchange=updates:every=2,topk"
    summary = compare(tmp_path, algorithms=methods, like="topk:0.02:raw32:float32", data=text_file, **SHORT)
    dense, diloco, updates, topk = (r["payload_bytes_per_step"] for r in summary["results"])
    assert diloco == dense / 4
    numel = Problem(CompareConfig(**TINY, data=text_file)).task([0]).layout.numel
    budget = 32 + 8 * round(0.02 * numel)
    assert 0.98 * budget <= updates <= budget and 0.98 * budget <= topk <= budget
    densities = [r["density"] for r in summary["results"]]
    assert densities[2] > 2 * densities[3]


@pytest.mark.usefixtures("undrawn")
def test_what_a_run_ends_with_and_what_the_page_says(tmp_path: Path, text_file: str) -> None:
    methods = "dense,topk:lr=0.001,dense:exchange=updates:every=4:outer=nesterov"
    summary = compare(tmp_path, algorithms=methods, lr=(1e-6, 0.05), seeds="1,2", data=text_file, **SHORT)
    assert (summary["metric"], summary["better"]) == ("test_loss", "smaller")
    records = read_records(tmp_path)
    for result in summary["results"]:
        ends = [r for r in records if (r["method"], r["step"]) == (result["method"], 8)]
        assert result["final"] == [r["test_loss"] for r in ends] and 0 < result["mean"] < math.log(96)
    dense, topk, diloco = summary["results"]
    assert topk["difference_from_dense"]["mean"] == pytest.approx(topk["mean"] - dense["mean"])
    assert summary["table"][0]["test_loss"] == min(r["mean"] for r in summary["results"])
    assert [r["lr"] for r in (dense, topk, diloco)] == [0.05, 0.001, 0.05]
    found = {(r["exchange"], r["clipped"], r["tuning_seed"]) for r in records}
    aggregate = {("gradients", "the aggregate", seed) for seed in (0, None)}
    assert found == aggregate | {("updates", "each worker's own", 0)}
    assert all(r["tuning"]["0.05"] < r["tuning"]["1e-06"] for r in records if r["tuning_seed"] == 0)
    assert records[-1]["outer"] == {"name": "nesterov", "lr": 0.7, "momentum": 0.9, "nesterov": True}
    page = write_report(tmp_path).read_text()
    assert "test loss, nats (smaller is better)" in page and "text_sha256" in page


def test_a_slice_of_another_text_is_refused(tmp_path: Path, text_file: str) -> None:
    compare(tmp_path / "run", algorithms="dense", data=text_file, num_steps=4)
    other = tmp_path / "other"
    other.write_text(Path(text_file).read_text()[::-1])
    with pytest.raises(Exception, match="text_sha256 must be"):
        compare(tmp_path / "run", algorithms="topk", data=str(other), num_steps=4, resume=True)
