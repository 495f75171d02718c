import torch

from regtopk.algorithms import GTopK
from regtopk.core import find_largest_
from regtopk.simulate import Cluster
from tests.algorithms.cases import random_grads, residual_of


def test_gtopk_by_hand() -> None:
    cluster = Cluster(GTopK(k=1), num_workers=2)
    # worker 0 sends entry 0 (5), worker 1 entry 1 (8); the sum is (2.5, 4, 0) and entry 1 is chosen:
    # the 5 goes back.                                       e_0 = (5, 3, 1), e_1 = (0, 0, 2)
    assert cluster.step(torch.tensor([[5.0, 3.0, 1.0], [0.0, 8.0, 2.0]])).tolist() == [0.0, 4.0, 0.0]
    assert residual_of(cluster).tolist() == [[5.0, 3.0, 1.0], [0.0, 0.0, 2.0]]
    # a_0 = (5, 3, 1), a_1 = (-5, 0, 4): both send entry 0, which cancels, and is still the one of largest
    # sum (all are zero, and of equal ones the first is taken): both have sent it
    assert cluster.step(torch.tensor([[0.0, 0.0, 0.0], [-5.0, 0.0, 2.0]])).tolist() == [0.0, 0.0, 0.0]
    assert residual_of(cluster).tolist() == [[0.0, 3.0, 1.0], [0.0, 0.0, 4.0]]


def test_of_equal_entries_the_first_are_chosen() -> None:
    magnitude = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0, 5.0]])
    assert find_largest_(torch.zeros(2, 5), magnitude, 3).tolist() == [[1, 2, 3], [0, 1, 4]]


def test_all_workers_together_lose_nothing() -> None:
    """What is not in the aggregate is in a residual: exactly, for whole gradients and binary weights."""
    weights = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    cluster = Cluster(GTopK(k=7), num_workers=4, weights=weights)
    given, applied = torch.zeros(4, 150).double(), torch.zeros(150).double()
    for grads in random_grads(100):
        given += grads.round()
        aggregate = cluster.step(grads.round())
        assert int((aggregate != 0).sum()) <= 7
        applied += aggregate
    residual = residual_of(cluster).double()
    assert torch.equal(applied + weights @ residual, weights @ given)
