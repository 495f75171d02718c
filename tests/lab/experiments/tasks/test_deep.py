"""Every setting of a deep training reaches what it is a setting of: results against ones computed by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk.lab.experiments.compare.config import CompareConfig, MethodAt
from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.data.splits import batch_order, divide
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.experiments.paper.fig3 import PRESETS
from regtopk.lab.experiments.tasks.deep import SmallCnnTask
from regtopk.lab.experiments.training.trainer import Trainer
from tests.lab.experiments.networks.test_engine import make_examples, plain_grad

LR = 0.1


def make_config(**settings: Any) -> CompareConfig:
    tiny = {"algorithms": "dense", "num_workers": 3, "batch_size": 5, "num_steps": 2, "lr": (LR,)}
    return CompareConfig(**{**PRESETS["smoke"], **tiny, **settings})


def make_trainer(config: CompareConfig) -> Trainer:
    (method,) = config.methods
    task = SmallCnnTask(config, config.chosen_seeds, make_examples())
    return Trainer(task, config.build(MethodAt(method, config.densities[0])), method, lr=config.lr[0])


def grads_of_seed(config: CompareConfig, examples: Examples, seed: int) -> tuple[list[Tensor], list[int]]:
    """Of every worker: torch's own gradient of its first batch, flat, and the size of its shard."""
    network = SmallCnnTask.make_network(config, examples, seed)
    shards = divide(examples.labels, config.num_workers, config.split, seed)
    first = batch_order(shards, config.batch_size, config.num_steps, seed)[0]
    return [plain_grad(network, examples, rows)[0] for rows in first], [len(shard) for shard in shards]


@pytest.mark.parametrize("split", ["dirichlet", "iid"])
def test_a_worker_weighs_what_its_shard_does(split: str) -> None:
    config, examples = make_config(split=split, seeds="5,0"), make_examples()
    trainer = make_trainer(config)
    trainer.run_until(1)
    for params, seed in zip(trainer.models, config.chosen_seeds, strict=True):
        grads, sizes = grads_of_seed(config, examples, seed)
        assert len(set(sizes)) == (1 if split == "iid" else 3)
        aggregate = torch.stack([n / sum(sizes) * g for n, g in zip(sizes, grads, strict=True)]).sum(0)
        expected = flatten(SmallCnnTask.make_network(config, examples, seed)) - LR * aggregate
        torch.testing.assert_close(params, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "setting",
    [
        {"split": "sorted"}, {"num_workers": 2}, {"batch_size": 4}, {"lr": (0.2,)}, {"optimizer": "momentum"},
        {"optimizer": "adam"}, {"densities": (0.02,)}, {"value_code": "4bit"},
        {"algorithms": "topk:index_code=raw32"}, {"seeds": "1,"},
    ],
    ids=str,
)  # fmt: skip
def test_no_setting_is_ignored(setting: dict[str, Any]) -> None:
    found = []
    for own in ({}, setting):
        trainer = make_trainer(make_config(**{"algorithms": "topk", "seeds": "1", **own}))
        trainer.run_until(2)
        found.append((trainer.moved_bytes("payload_bytes"), trainer.models.tolist()))
    assert found[0] != found[1]
