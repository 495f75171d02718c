import torch
from torch import Tensor

from regtopk.algorithms import AdaComp
from regtopk.core.worker import Layout
from regtopk.simulate import Cluster


def residual_of(cluster: Cluster) -> Tensor:
    assert cluster.state is not None
    return cluster.state.state_dict()["residual"]


def test_adacomp_by_hand() -> None:
    layout = Layout.of_shapes([("conv", (4,), "conv"), ("linear", (3,), "linear")])
    cluster = Cluster(AdaComp(bin_conv=2, bin_other=3), num_workers=1, layout=layout)
    # e = 0, so H = 2 a
    # conv: bins of maximum 4 and 2, |H| = 8, 2 and 4, 3: entries 0, 2, 3, of value (4 + 2) / 2
    # linear: one bin of maximum 6, |H| = 2, 12, 6: entries 5, 6, of value -6
    aggregate = cluster.step(torch.tensor([[4.0, -1.0, 2.0, 1.5, 1.0, -6.0, -3.0]]))
    assert aggregate.tolist() == [3.0, 0.0, 3.0, 3.0, 0.0, -6.0, -6.0]
    assert residual_of(cluster).tolist() == [[1.0, -1.0, -1.0, -1.5, 1.0, 0.0, 3.0]]
    # conv: a = 1.5, -1.5 and -0.5, -1.5, H = 2, -2 and 0, -1.5: entries 0, 1, 3, of value 1.5
    # linear: a = 1, 1, 3, H = 1, 2, 3: entry 6, of value 3
    # 1.5 and 3 are positive values of one block of the code: both travel as their mean, 2.25
    aggregate = cluster.step(torch.tensor([[0.5, -0.5, 0.5, 0.0, 0.0, 1.0, 0.0]]))
    assert aggregate.tolist() == [2.25, -1.5, 0.0, -1.5, 0.0, 0.0, 2.25]
    assert residual_of(cluster).tolist() == [[-0.75, 0.0, -0.5, 0.0, 1.0, 1.0, 0.75]]


def test_bins_are_50_in_convolutions_and_500_elsewhere() -> None:
    layout = Layout.of_shapes([("conv", (100,), "conv"), ("linear", (100,), "linear")])
    grads = torch.full((1, 200), 0.1)
    grads[0, [0, 100]], grads[0, [50, 150]] = 10.0, 4.0
    cluster = Cluster(AdaComp(), num_workers=1, layout=layout)
    aggregate = cluster.step(grads)
    assert aggregate.nonzero().flatten().tolist() == [0, 50, 100]  # 2 · 4 does not reach 10 in one bin


def test_the_number_sent_follows_the_activity() -> None:
    cluster = Cluster(AdaComp(bin_other=10), num_workers=2)
    lonely, busy = torch.full((100,), 0.01), torch.ones(100)
    lonely[::10] = 1.0
    cluster.step(torch.stack([lonely, busy]))
    assert cluster.last_step.num_entries.tolist() == [10, 100]
