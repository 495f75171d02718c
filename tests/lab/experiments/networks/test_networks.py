"""The networks, and their batch norm, which writes nothing while it trains."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regtopk.lab.experiments.networks.convolutional import NETWORKS
from regtopk.lab.experiments.networks.gpt import GPT
from regtopk.lab.experiments.networks.norm import BatchNorm, record_statistics

ALL: dict[str, Callable[[int], nn.Module]] = {**NETWORKS, "gpt": GPT}


def make(name: str, num_outputs: int = 10, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ALL[name](num_outputs)


def inputs_of(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if name == "gpt":
        return torch.randint(10, (2, 8), generator=generator)
    return torch.randn(2, 3, 16, 16, generator=generator)


def in_bf16() -> list[Any]:
    """The networks; a CPU without bfloat16 takes a minute for the ResNets, which other networks stand for."""
    is_slow = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    too_slow = pytest.mark.skipif(is_slow, reason="this CPU has no bfloat16: too slow")
    return [pytest.param(name, marks=too_slow if "resnet" in name else ()) for name in ALL]


@pytest.mark.parametrize(
    ("name", "num_outputs", "expected"),
    [
        ("resnet18", 10, 11_173_962),
        ("resnet18-gn", 10, 11_173_962),
        ("gpt", 100, 4 * (12 * 128**2 + 13 * 128) + 2 * 128 + (100 + 128) * 128),
        ("small-cnn", 10, 19_546),
    ],
)
def test_parameters_are_counted(name: str, num_outputs: int, expected: int) -> None:
    assert sum(p.numel() for p in make(name, num_outputs).parameters()) == expected


@pytest.mark.parametrize("name", in_bf16())
def test_a_training_pass_in_bf16_reaches_all_parameters_and_leaves_all_buffers(name: str) -> None:
    network, x = make(name), inputs_of(name)
    for tensor in (*network.parameters(), x):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
    before = copy.deepcopy(dict(network.named_buffers()))
    with torch.autocast("cpu", torch.bfloat16):
        scores, again = network(x), network(x)
    assert scores.shape == (*x.shape[: 2 if name == "gpt" else 1], 10) and scores.dtype == torch.bfloat16
    assert torch.equal(scores, again)  # nothing is drawn
    F.cross_entropy(scores.float().flatten(0, -2), torch.zeros(scores[..., 0].numel()).long()).backward()
    for parameter in network.parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any()
    assert all(torch.equal(before[key], value) for key, value in network.named_buffers())


@pytest.mark.parametrize("name", list(ALL))
def test_nothing_reads_values_back(name: str) -> None:
    """A meta tensor has no values, so what runs on it can be captured in a CUDA graph."""
    scores = make(name).to("meta")(inputs_of(name).to("meta"))
    assert scores.shape[-1] == 10


@pytest.mark.parametrize("name", in_bf16())
def test_parameters_of_norms_may_stay_in_float32(name: str) -> None:
    network, x = make(name), inputs_of(name)
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear, nn.Embedding)):
            module.to(torch.bfloat16)
    scores = network(x.bfloat16() if x.is_floating_point() else x)
    assert scores.dtype == torch.bfloat16 and scores.isfinite().all()


@torch.no_grad()
def test_gpt_does_not_see_what_comes() -> None:
    network, tokens = make("gpt"), inputs_of("gpt")
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 10
    one, other = network(tokens), network(changed)
    assert torch.equal(one[:, :5], other[:, :5])
    assert (one[:, 5:] != other[:, 5:]).any(-1).all()


def test_the_small_network_takes_grey_images_too() -> None:
    network, grey = make("small-cnn"), torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(network(grey), network(grey.repeat(1, 3, 1, 1)))


def images(seed: int = 0) -> Tensor:
    return 3 + 2 * torch.randn(8, 5, 6, 6, generator=torch.Generator().manual_seed(seed))


def test_training_normalises_by_the_batch_and_writes_nothing() -> None:
    ours, torchs = BatchNorm(5), nn.BatchNorm2d(5)
    assert torch.equal(ours(images()), torchs(images()))
    assert not ours.running_mean.any() and torch.equal(ours.running_var, torch.ones(5))


def test_evaluation_uses_the_statistics_of_the_batch_that_was_recorded_last() -> None:
    norm = BatchNorm(5)
    norm.running_mean.fill_(torch.nan)  # a model that diverged leaves such
    for seed in (1, 0):
        record_statistics(norm, images(seed))
    assert not norm.training and not norm.recording
    mean, var = images().mean((0, 2, 3)), images().transpose(0, 1).flatten(1).var(-1)
    assert torch.allclose(norm.running_mean, mean) and torch.allclose(norm.running_var, var)
    expected = (images(1) - mean.view(5, 1, 1)) / (var + norm.eps).sqrt().view(5, 1, 1)
    assert torch.allclose(norm(images(1)), expected, atol=1e-6)


@torch.no_grad()
def test_recorded_statistics_of_a_network_make_evaluation_agree_with_training() -> None:
    network = NETWORKS["small-cnn"](10)
    batch = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = network(batch)
    unrecorded = network.eval()(batch)
    record_statistics(network, batch)
    # n / (n - 1) of the variance, n = 64 * 16 positions in the last layer
    assert torch.allclose(network(batch), expected, rtol=5e-3, atol=5e-3)
    assert not torch.allclose(unrecorded, expected, rtol=5e-2, atol=5e-2)
