import torch

from regtopk.algorithms import HardThreshold
from regtopk.simulate import Cluster


def test_the_threshold_of_k_by_hand() -> None:
    # k = 4: lambda = 1 / (2 · 2) = 0.25.     e = (0, -0.125, 0, 0, 0)
    cluster = Cluster(HardThreshold(k=4), num_workers=1)
    grads = torch.tensor([[0.25, -0.125, 0.5, 0.0, -0.375]])
    assert cluster.step(grads).tolist() == [0.25, 0.0, 0.5, 0.0, -0.375]
    assert cluster.step(torch.tensor([[0.0, -0.125, 0.125, 0.0, 0.0]])).tolist() == [0, -0.25, 0, 0, 0]
    assert cluster.last_step.num_entries.tolist() == [1]


def test_a_given_threshold_and_workers_that_send_different_numbers() -> None:
    cluster = Cluster(HardThreshold(threshold=2.0), num_workers=2)
    assert cluster.step(torch.tensor([[2.0, -3.0, 1.0], [1.0, 1.0, 1.0]])).tolist() == [1.0, -1.5, 0.0]
    assert cluster.last_step.num_entries.tolist() == [2, 0]
    assert cluster.step(torch.ones(2, 3)).tolist() == [1.0, 1.0, 2.0]
