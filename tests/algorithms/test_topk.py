import torch

from regtopk.algorithms import TopK
from regtopk.simulate import Cluster


def test_topk_by_hand() -> None:
    cluster = Cluster(TopK(k=1), num_workers=2)
    # both send entry 0: 6/2 - 6/2 = 0.                      e_0 = (0, 4, 1), e_1 = (0, 4, 2)
    assert cluster.step(torch.tensor([[6.0, 4.0, 1.0], [-6.0, 4.0, 2.0]])).tolist() == [0.0, 0.0, 0.0]
    # a_0 = (1, 4, 5): entry 2. a_1 = (1, 6, 5): entry 1.    e_0 = (1, 4, 0), e_1 = (1, 0, 5)
    assert cluster.step(torch.tensor([[1.0, 0.0, 4.0], [1.0, 2.0, 3.0]])).tolist() == [0.0, 3.0, 2.5]
    # nothing new: a_0 = (1, 4, 0), entry 1; a_1 = (1, 0, 5), entry 2
    assert cluster.step(torch.zeros(2, 3)).tolist() == [0.0, 2.0, 2.5]
