import torch

from regtopk.algorithms import Dense
from regtopk.simulate import Cluster


def test_dense_by_hand() -> None:
    cluster = Cluster(Dense(), num_workers=2, weights=[0.25, 0.75])
    # 6/4 - 18/4, 4/4 + 12/4, 1/4 + 6/4
    assert cluster.step(torch.tensor([[6.0, 4.0, 1.0], [-6.0, 4.0, 2.0]])).tolist() == [-3.0, 4.0, 1.75]
