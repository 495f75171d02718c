import pytest
import torch

from regtopk.algorithms import GradientDropping
from regtopk.core.worker import Layout
from regtopk.simulate import Cluster

LAYOUT = Layout.of_shapes([("large", (2, 2), "linear"), ("small", (4,), "bias")])
GRADS = torch.tensor([[8.0, -7.0, 6.0, 5.0, 0.4, 0.3, -0.2, 0.1]])


def test_gradient_dropping_by_hand() -> None:
    cluster = Cluster(GradientDropping(density=0.25), num_workers=1)
    # the sample is all of 8 entries; a quarter of them reaches 7.     e = (0, 0, 6, 5, ...)
    assert cluster.step(GRADS).tolist() == [8.0, -7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    # a = (1, 1, 6, 5, 0.4, ...): a quarter reaches 5
    grads = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    assert cluster.step(grads).tolist() == [0.0, 0.0, 6.0, 5.0, 0.0, 0.0, 0.0, 0.0]


def test_every_layer_has_a_threshold_of_its_own() -> None:
    cluster = Cluster(GradientDropping(density=0.25, per_layer=True), num_workers=1, layout=LAYOUT)
    expected = [8.0, 0.0, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0]
    assert torch.equal(cluster.step(GRADS), torch.tensor(expected))


@pytest.mark.parametrize("per_layer", [False, True])
def test_a_sample_sends_about_k(per_layer: bool) -> None:
    """1600 of 100,000 entries are sampled, and 16 of these reach the threshold: 25 % off is one sigma."""
    layout = Layout.of_shapes([("a", (100_000,), "linear"), ("b", (100_000,), "linear")])
    algorithm = GradientDropping(density=0.01, per_layer=per_layer)
    cluster = Cluster(algorithm, num_workers=4, layout=layout)
    cluster.step(torch.randn(4, 200_000, generator=torch.Generator().manual_seed(0)))
    num_sent = cluster.last_step.num_entries
    assert len(set(num_sent.tolist())) > 1 and 2000 not in num_sent  # a sample, not exactly k
    assert bool(((num_sent > 1000) & (num_sent < 4000)).all())


def test_zeros_are_not_sent() -> None:
    grads = torch.zeros(1, 1000)
    grads[0, 500] = 1.0
    cluster = Cluster(GradientDropping(density=0.1), num_workers=1)
    cluster.step(grads)
    assert cluster.last_step.num_entries.tolist() == [1]
