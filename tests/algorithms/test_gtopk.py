import torch

from regtopk.algorithms import GTopK
from regtopk.simulate import Cluster
from tests.algorithms.cases import residual_of


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
