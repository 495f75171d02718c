import torch

from regtopk.algorithms import GradientDropping
from regtopk.simulate import Cluster

GRADS = torch.tensor([[8.0, -7.0, 6.0, 5.0, 0.4, 0.3, -0.2, 0.1]])


def test_gradient_dropping_by_hand() -> None:
    cluster = Cluster(GradientDropping(density=0.25), num_workers=1)
    # the sample is all of 8 entries; a quarter of them reaches 7.     e = (0, 0, 6, 5, ...)
    assert cluster.step(GRADS).tolist() == [8.0, -7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    # a = (1, 1, 6, 5, 0.4, ...): a quarter reaches 5
    grads = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    assert cluster.step(grads).tolist() == [0.0, 0.0, 6.0, 5.0, 0.0, 0.0, 0.0, 0.0]


def test_a_sample_sends_about_k() -> None:
    """1600 of 100,000 entries are sampled, and 16 of these reach the threshold: 25 % off is one sigma."""
    cluster = Cluster(GradientDropping(density=0.01), num_workers=4)
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
