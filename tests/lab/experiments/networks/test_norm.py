import torch
from torch import Tensor, nn

from regtopk.lab.experiments.networks.convolutional import NETWORKS
from regtopk.lab.experiments.networks.norm import BatchNorm, record_statistics


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
