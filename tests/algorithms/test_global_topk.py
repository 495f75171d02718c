import torch

from regtopk.algorithms import GlobalTopK
from regtopk.core.requests import Peek
from regtopk.core.worker import Layout, Worker
from regtopk.simulate import Cluster

GRADS = torch.tensor([[6.0, 4.0, 1.0], [-6.0, 4.0, 2.0]])


def test_global_topk_by_hand() -> None:
    cluster = Cluster(GlobalTopK(k=1), num_workers=2)
    # a = (0, 4, 1.5): entry 1.                              e_0 = (6, 0, 1), e_1 = (-6, 0, 2)
    assert cluster.step(GRADS).tolist() == [0.0, 4.0, 0.0]
    # a = ((7 - 5) / 2, (0 + 2) / 2, (4 + 5) / 2): entry 2
    assert cluster.step(torch.tensor([[1.0, 0.0, 3.0], [1.0, 2.0, 3.0]])).tolist() == [0.0, 0.0, 4.5]
    # a = ((7 - 15) / 2, 1, 0): entry 0, the largest by magnitude
    assert cluster.step(torch.tensor([[0.0, 0.0, 0.0], [-10.0, 0.0, 0.0]])).tolist() == [-4.0, 0.0, 0.0]


def test_an_oracle_that_is_refused_has_changed_nothing() -> None:
    algorithm = GlobalTopK(k=1)
    worker = Worker(torch.tensor(0.5), torch.tensor(0), 2, 0, Layout.anonymous(3))
    state = algorithm.init(worker)
    conversation = algorithm.exchange(GRADS[0], state, worker)
    assert isinstance(next(conversation), Peek)
    conversation.close()  # the driver of a real cluster cannot answer, and gives up
    assert state.residual.tolist() == [0.0, 0.0, 0.0]
