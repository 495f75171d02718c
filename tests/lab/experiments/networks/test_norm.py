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


def test_recording_takes_the_batchs_own_statistics() -> None:
    norm = BatchNorm(5)
    norm.running_mean.fill_(torch.nan)  # a model that diverged leaves such
    norm.recording = True
    norm(images(1))
    output = norm(images())
    assert torch.allclose(norm.running_mean, images().mean((0, 2, 3)))
    assert torch.allclose(norm.running_var, images().transpose(0, 1).flatten(1).var(-1))
    assert torch.equal(output, BatchNorm(5)(images()))


def test_evaluation_uses_what_was_recorded() -> None:
    norm = BatchNorm(5)
    record_statistics(norm, images())
    assert not norm.training and not norm.recording
    mean, var = (t.view(5, 1, 1) for t in (norm.running_mean, norm.running_var))
    assert torch.allclose(norm(images(1)), (images(1) - mean) / (var + norm.eps).sqrt(), atol=1e-6)


@torch.no_grad()
def test_recorded_statistics_of_a_network_make_evaluation_agree_with_training() -> None:
    network = NETWORKS["small-cnn"](10)
    batch = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = network(batch)
    unrecorded = network.eval()(batch)
    record_statistics(network, batch)
    assert not network.training
    # n / (n - 1) of the variance, n = 64 * 16 positions in the last layer
    assert torch.allclose(network(batch), expected, rtol=5e-3, atol=5e-3)
    assert not torch.allclose(unrecorded, expected, rtol=5e-2, atol=5e-2)


def test_without_batch_norm_only_the_mode_changes() -> None:
    network = nn.Linear(2, 2)
    record_statistics(network, torch.rand(1, 3))  # of no size it could take: it is not called
    assert not network.training
