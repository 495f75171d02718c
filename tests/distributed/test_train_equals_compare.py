"""`regtopk train --task gpt` on real ranks ends with the bits of `regtopk compare gpt` in the simulator."""

import platform
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk.lab.experiments.compare.config import MethodAt
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.experiments.ranks.config import TrainConfig
from regtopk.lab.experiments.ranks.tasks import load_task, save_examples
from regtopk.lab.experiments.ranks.train import RankTraining
from regtopk.lab.experiments.settings import threads_for
from regtopk.lab.experiments.tasks import Problem
from regtopk.lab.experiments.training.trainer import Trainer
from regtopk.lab.method import Method
from tests.distributed.ranks import Ranks

SMALL: dict[str, Any] = {
    "task": "gpt", "num_steps": 8, "batch_size": 2, "num_layers": 1, "width": 32, "context": 16,
}  # fmt: skip
SEED = 1
IMPUTED = "topk:value_code=4bit:impute=0.35:exchange=updates"
Result = tuple[Tensor, float]  # the model, and the bytes that a worker contributed


def on_rank(settings: dict[str, Any], label: str, has_hook: bool, examples: Path) -> Result:
    """What this rank ends with; without a hook gradients are left to DDP."""
    config = TrainConfig(**settings)
    method = config.complete(Method.parse(label))
    task = load_task(config, examples, SEED, torch.device("cpu"))
    training = RankTraining(task, config, method, is_plain=not has_hook)
    for _ in range(config.num_steps):
        training.step()
    model = flatten(training.network)
    if method.rounds.has_updates:
        with training.exchange.agreed():
            model = flatten(training.network)
    if training.exchange is not None:
        training.exchange.close()
    return model, training.measure()["payload_bytes"]


def simulated(settings: dict[str, Any], label: str) -> Result:
    """What the comparison with the same settings, seed and method ends with."""
    config = TrainConfig(**settings)
    method = config.complete(Method.parse(label))
    algorithm = config.build(MethodAt(method, config.densities[0]))
    with threads_for(0):
        task, lr = Problem(config).task([SEED]), method.lr or config.lr[0]
        trainer = Trainer(task, algorithm, method, lr=lr, num_steps=config.num_steps)
        start = trainer.models[0].clone()
        trainer.run_until(config.num_steps)
    assert (trainer.models[0] != start).double().mean() > 0.01
    return trainer.models[0], trainer.moved_bytes("payload_bytes")[0]


def check(ranks: Ranks, label: str, text_file: str, *, has_hook: bool = True, **settings: Any) -> None:
    settings = {"collective": "all_gather", **SMALL, **settings}
    settings |= {"num_workers": ranks.num_ranks, "data": text_file}
    examples = Path(f"{text_file}.examples")
    save_examples(TrainConfig(**settings), examples)
    waiting = ranks.start(on_rank, settings, label, has_hook, examples)
    model, payload_bytes = simulated(settings, label)
    found = ranks.wait_for(waiting)
    for own, _ in found:
        assert torch.equal(own, model), f"{int((own != model).sum())} of {len(model)} entries differ"
    if has_hook and settings["collective"] != "split":  # DDP has no frames, and a split two messages
        assert fmean(own_bytes for _, own_bytes in found) == payload_bytes


@pytest.mark.parametrize(
    ("label", "num_ranks"),
    [
        (IMPUTED, 2),
        (f"{IMPUTED}:outer=nesterov", 2),
        (f"{IMPUTED}:every=2:lr=0.008", 2),
        (f"{IMPUTED}:every=2:outer=nesterov", 4),
        ("dense:exchange=updates:every=2:outer=sgd:outer_lr=0.5", 4),
        (f"{IMPUTED}:every=4:delay=2:mix=0.5", 2),
        (f"{IMPUTED}:every=4:fragments=3:delay=3:outer=nesterov", 4),
        (f"{IMPUTED}:every=4/1", 2),
        (f"{IMPUTED}:every=4/3:delay=2:outer=nesterov:clip_norm=0.9", 2),
        (f"{IMPUTED}:every=4/4/2/2:fragments=2:clip_norm=1", 4),
        *((f"topk:exchange=updates:every=2:optimizer={name}", 2) for name in ("sgdw", "momentum", "adam")),
        ("topk:value_code=2bit:returned=0.02:exchange=updates:every=4:fragments=2:delay=1", 4),
        ("regtopk:density=0.05", 4),
        ("dense", 4),  # with a hook, which sums in the order of ranks
    ],
)
def test_every_bit(two_ranks: Ranks, four_ranks: Ranks, num_ranks: int, label: str, text_file: str) -> None:
    check({2: two_ranks, 4: four_ranks}[num_ranks], label, text_file)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="products of a batch may add in another order")
def test_every_bit_of_muon(two_ranks: Ranks, text_file: str) -> None:
    """Ranks run torch's Muon and AdamW, one matrix after another; simulated workers are one batch."""
    updates = f"{IMPUTED}:every=2:fragments=2:optimizer=muon"
    for label in ("topk:impute=0.35:optimizer=muon", "dense:optimizer=muon", updates):
        check(two_ranks, label, text_file, lr=(0.01,))


def test_plain_ddp_of_two_ranks(two_ranks: Ranks, text_file: str) -> None:
    """Sums of two numbers have one order alone. On four ranks gloo adds in another order than ours."""
    check(two_ranks, "dense", text_file, has_hook=False)
