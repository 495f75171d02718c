"""Gradients of many workers over flat buffers, against torch's own, one worker at a time."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.lab.experiments.data.examples import Examples
from regtopk.lab.experiments.networks.convolutional import NETWORKS
from regtopk.lab.experiments.networks.engine import Engine
from regtopk.lab.experiments.networks.flat import FlatWeights, flatten
from regtopk.lab.experiments.networks.gpt import GPT
from regtopk.lab.experiments.networks.norm import record_statistics


def make_examples(num: int = 60) -> Examples:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num, 8, 8, 3, generator=generator)
    labels = torch.randint(10, (num,), generator=generator)
    return Examples(images, labels, 2 * images[:30] + 1, labels[:30], labels, 10)  # whose statistics matter


def make_models(num: int) -> tuple[list[nn.Module], Tensor]:
    torch.manual_seed(1)
    networks = [NETWORKS["small-cnn"](10) for _ in range(num)]
    return networks, torch.stack([flatten(network) for network in networks])


def plain_grad(network: nn.Module, examples: Examples, rows: Tensor) -> tuple[Tensor, Tensor]:
    x = examples.train[rows].permute(0, 3, 1, 2)
    loss = F.cross_entropy(network(x), examples.train_targets[rows])
    grads = torch.autograd.grad(loss, list(network.parameters()))
    return torch.cat([(g.permute(0, 2, 3, 1) if g.dim() == 4 else g).flatten() for g in grads]), loss.detach()


@pytest.mark.parametrize("has_own_weights", [False, True])
def test_every_worker_of_every_model_has_its_own_gradient(has_own_weights: bool) -> None:
    examples = make_examples()
    networks, params = make_models(2)
    engine = Engine(
        networks[0], examples, num_models=2, num_workers=3, batch_size=5, has_own_weights=has_own_weights
    )
    rows = torch.randint(60, (2, 3, 5), generator=torch.Generator().manual_seed(2))
    given = params.unsqueeze(1).repeat(1, 3, 1) if has_own_weights else params
    grads, losses = engine.grads(given, rows)
    for model in range(2):
        for worker in range(3):
            grad, loss = plain_grad(networks[model], examples, rows[model, worker])
            torch.testing.assert_close(grads[model, worker], grad, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(losses[model, worker], loss)


@pytest.mark.parametrize("has_own_weights", [False, True])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)])
def test_a_network_of_many_models_computes_what_each_of_them_does(
    dtype: torch.dtype, error: float, has_own_weights: bool
) -> None:
    """But for the order in which products of a batch add."""
    torch.manual_seed(0)
    text = torch.randint(40, (20, 9))  # short, and the network small: a CPU without bfloat16 is slow
    x, y = text[:, :-1], text[:, 1:]
    examples, network = Examples(x, y, x, y, text[:, 0], 40), GPT(40, 8, width=16, num_layers=2, num_heads=2)
    shape = (2, 3, 1) if has_own_weights else (2, 1)
    models = flatten(network) * (1 + 0.1 * torch.rand(shape))
    sizes: dict[str, Any] = {"num_models": 2, "num_workers": 3, "batch_size": 4, "dtype": dtype}
    sizes["has_own_weights"] = has_own_weights
    one_by_one, stacked = (Engine(network, examples, **sizes, is_stacked=flag) for flag in (False, True))
    for rows in torch.randint(20, (2, 2, 3, 4)):
        (grads, losses), (expected, own_losses) = (e.grads(models, rows) for e in (stacked, one_by_one))
        torch.testing.assert_close(losses, own_losses)
        assert float(((grads - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < error
    assert stacked.evaluate(models.flatten(0, -2)[:2]) == one_by_one.evaluate(models.flatten(0, -2)[:2])


def test_weights_are_views_with_channels_last_and_norms_stay_in_float32() -> None:
    network = NETWORKS["small-cnn"](10)
    weights = FlatWeights(network, 2, torch.bfloat16, torch.device("cpu"))
    bound = weights.bind(copy.deepcopy(network), 1)
    weights.load_(flatten(network))
    own = dict(network.named_parameters())
    for name, parameter in bound.named_parameters():
        is_norm = name.split(".")[1] in "147"
        assert parameter.dtype == (torch.float32 if is_norm else torch.bfloat16)  # what it computes in
        torch.testing.assert_close(parameter.float(), own[name].to(parameter.dtype).float(), rtol=0, atol=0)
        if parameter.dim() == 4:
            assert parameter.is_contiguous(memory_format=torch.channels_last)
    assert weights.layout.numel == sum(p.numel() for p in network.parameters())
    assert {layer.name: layer.kind for layer in weights.layout.layers}["fc.bias"] == "bias"


def test_evaluation_counts_what_the_network_gets_right() -> None:
    examples = make_examples()
    networks, params = make_models(2)
    engine = Engine(networks[0], examples, num_models=2, num_workers=1, batch_size=5)
    for network, quality in zip(networks, engine.evaluate(params), strict=True):
        record_statistics(network, examples.train.permute(0, 3, 1, 2))
        with torch.no_grad():
            scores = network(examples.test.permute(0, 3, 1, 2))
        assert quality["accuracy"] == pytest.approx(
            100 * float((scores.argmax(-1) == examples.test_targets).double().mean())
        )
        assert quality["test_loss"] == pytest.approx(
            float(F.cross_entropy(scores, examples.test_targets)), rel=1e-5
        )
