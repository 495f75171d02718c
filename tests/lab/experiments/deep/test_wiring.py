"""Every setting of a deep training reaches what it is a setting of: results against ones computed by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

from regtopk.lab.experiments.compare.protocol import Run
from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.data.splits import batch_order, divide
from regtopk.lab.experiments.networks import NETWORKS, load_weights
from regtopk.lab.experiments.networks.efficientnet import published_weights
from regtopk.lab.experiments.networks.flat import FlatWeights
from regtopk.lab.experiments.networks.norm import record_statistics
from regtopk.lab.experiments.paper.fig3 import FIG3
from regtopk.lab.experiments.paper.fig3_config import PRESETS, PUBLISHED, DeepConfig
from regtopk.lab.experiments.tasks.fig3_task import DeepProblem, make_network
from regtopk.lab.experiments.training.trainer import Trainer
from regtopk.lab.runs import read_records

NUM_EXAMPLES = 60
LR = 0.1
CPU = torch.device("cpu")


def make_config(**settings: Any) -> DeepConfig:
    tiny = {"methods": "dense", "num_workers": 3, "batch_size": 5, "num_rounds": 2, "lr": LR}
    return DeepConfig(**{**PRESETS["smoke"], "preset": "smoke", **tiny, **settings})


def make_examples() -> Examples:
    """Test images are brighter than training images, so that it matters whose statistics norms use."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_EXAMPLES, 8, 8, 3, generator=generator)
    labels = torch.randint(10, (NUM_EXAMPLES,), generator=generator)
    return Examples(images, labels, 2 * images[:30] + 1, labels[:30], labels, 10)


def first_batch(examples: Examples, num: int) -> tuple[Tensor, Tensor]:
    """As torch takes images: (num, channels, height, width), and their labels."""
    return examples.train[:num].permute(0, 3, 1, 2), examples.train_targets[:num]


def first_loss(config: DeepConfig) -> Tensor:
    """What the engine of these settings has as the loss of seed 0's first model on the first examples."""
    problem = DeepProblem(config, make_examples())
    rows = torch.arange(config.batch_size).expand(1, config.num_workers, -1)
    return problem.engine(1).grads(problem.first_model(0), rows)[1][0, 0]


def make_trainer(config: DeepConfig) -> Trainer:
    method = config.plan.methods[0]
    return Trainer(
        DeepProblem(config, make_examples()).task(config.plan.seeds),
        config.build(Run(method, config.density)),
        optimizer=config.optimizer,
        lr=config.lr,
        index_code=config.index_code_of(method),
    )


def grads_of_seed(config: DeepConfig, examples: Examples, seed: int) -> tuple[list[Tensor], list[int]]:
    """Of every worker: torch's own gradient of its first batch, flat, and the size of its shard."""
    network = make_network(config, examples.num_classes, seed)
    shards = divide(examples.labels, config.num_workers, config.split, seed)
    grads = []
    for rows in batch_order(shards, config.batch_size, config.num_rounds, seed)[0]:
        scores = network(examples.train[rows].permute(0, 3, 1, 2))
        loss = F.cross_entropy(scores, examples.train_targets[rows])
        parts = torch.autograd.grad(loss, list(network.parameters()))
        grads.append(torch.cat([(p.permute(0, 2, 3, 1) if p.dim() == 4 else p).flatten() for p in parts]))
    return grads, [len(shard) for shard in shards]


@pytest.mark.parametrize(
    ("split", "is_uniform"), [("unequal", False), ("unequal", True), ("dirichlet", False), ("iid", False)]
)
def test_a_worker_weighs_what_its_shard_does_unless_all_weigh_the_same(split: str, is_uniform: bool) -> None:
    config, examples = make_config(split=split, uniform_weights=is_uniform, seeds="5,0"), make_examples()
    trainer = make_trainer(config)
    trainer.run_until(1)
    for params, seed in zip(trainer.models, config.plan.seeds, strict=True):
        grads, sizes = grads_of_seed(config, examples, seed)
        assert len(set(sizes)) == (1 if split == "iid" else 3)
        weights = [1 / 3 if is_uniform else size / NUM_EXAMPLES for size in sizes]
        aggregate = torch.stack([w * g for w, g in zip(weights, grads, strict=True)]).sum(0)
        expected = DeepProblem(config, examples).first_model(seed) - LR * aggregate
        torch.testing.assert_close(params, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"local_steps": 2}, {"sends": "difference"}])
def test_a_method_with_an_lr_of_its_own_is_the_method_under_that_lr(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    runs = []
    for methods, lr in (("topk:lr=0.4", 0.2), ("topk", 0.4)):
        config = make_config(methods=methods, lr=lr, seeds="1", evaluate_every=1, **settings)
        folder = tmp_path / str(lr)
        FIG3.record(config, folder, command="")
        measured = ("step", "accuracy", "test_loss", "loss", "payload_bytes", "lr")
        runs.append([[one[name] for name in measured] for one in read_records(folder)])
    assert runs[0] == runs[1]
    assert [one[-1] for one in runs[0]] == [0.4, 0.4]


@pytest.mark.parametrize("double_softmax", [False, True])
def test_the_loss_takes_one_softmax_more_where_asked(double_softmax: bool) -> None:
    config = make_config(double_softmax=double_softmax)
    images, labels = first_batch(make_examples(), config.batch_size)
    scores = make_network(config, 10, seed=0)(images)
    log_softmax = (scores.softmax(-1) if double_softmax else scores).log_softmax(-1)
    expected = -log_softmax.gather(1, labels.unsqueeze(1)).mean().detach()
    torch.testing.assert_close(first_loss(config), expected)


@pytest.mark.parametrize("image_size", [0, 20])
def test_the_network_sees_images_of_the_size_asked_for(image_size: int) -> None:
    config = make_config(image_size=image_size)
    images, labels = first_batch(make_examples(), config.batch_size)
    if image_size:
        images = F.interpolate(images, size=(image_size, image_size), mode="bilinear")
    expected = F.cross_entropy(make_network(config, 10, seed=0)(images), labels).detach()
    torch.testing.assert_close(first_loss(config), expected)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_convolutions_and_linear_layers_compute_in_the_precision_asked_for(precision: str) -> None:
    dtypes: dict[str, torch.dtype] = {}

    def see(module: nn.Module, inputs: object, output: Tensor) -> None:
        dtypes[type(module).__name__] = output.dtype

    hook = register_module_forward_hook(see)
    try:
        loss = first_loss(make_config(precision=precision))
    finally:
        hook.remove()
    expected = getattr(torch, precision)
    assert (dtypes["Conv2d"], dtypes["Linear"], loss.dtype) == (expected, expected, torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("batch_statistics", [False, True])
def test_norms_are_evaluated_by_the_statistics_asked_for(batch_statistics: bool) -> None:
    config, examples = make_config(batch_statistics=batch_statistics), make_examples()
    network = make_network(config, 10, seed=0)  # in training mode, where norms use the batch's own statistics
    if not batch_statistics:
        record_statistics(network, examples.train.permute(0, 3, 1, 2))
    expected = F.cross_entropy(network(examples.test.permute(0, 3, 1, 2)), examples.test_targets)
    problem = DeepProblem(config, examples)
    (quality,) = problem.engine(1).evaluate(problem.first_model(0).unsqueeze(0))
    assert quality["test_loss"] == pytest.approx(float(expected), rel=1e-5)


def own_weights(folder: Path) -> Path:
    path = folder / "weights.pt"
    torch.save(NETWORKS["small-cnn"](7).state_dict(), path)
    return path


@pytest.mark.parametrize(("name", "num_in_file"), [("small-cnn", 7), ("efficientnet-lite0", 1000)])
def test_training_starts_from_the_weights_of_a_file_with_a_head_of_the_seed(
    tmp_path: Path, name: str, num_in_file: int
) -> None:
    is_own = name == "small-cnn"
    path = own_weights(tmp_path) if is_own else published_weights()
    config = make_config(network=name, weights=str(path) if is_own else PUBLISHED)
    in_file = NETWORKS[name](num_in_file)
    load_weights(in_file, path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        own = NETWORKS[name](10)
    first = FlatWeights(own, 1, torch.float32, CPU).views(DeepProblem(config, make_examples()).first_model(3))
    for key, tensor in in_file.named_parameters():
        expected = own.get_parameter(key) if key.startswith("fc.") else tensor
        assert torch.equal(first[key], expected), key


@pytest.mark.parametrize(
    "setting",
    [
        {"split": "sorted"},
        {"num_workers": 2},
        {"batch_size": 4},
        {"local_steps": 2},
        {"optimizer": "momentum"},
        {"optimizer": "adam"},
        {"density": 0.02},
        {"value_code": "4bit"},
        {"methods": "topk:index_code=raw32"},
        {"seeds": "1,"},
    ],
    ids=str,
)
def test_no_setting_is_ignored(setting: dict[str, Any]) -> None:
    """What the tests above, and those of what is sent, do not compute by hand."""
    found = []
    for own in ({}, setting):
        trainer = make_trainer(make_config(**{"methods": "topk", "seeds": "1", **own}))
        trainer.run_until(2)
        found.append((trainer.payload_bytes, trainer.models.tolist()))
    assert found[0] != found[1]
