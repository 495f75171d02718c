import torch

from regtopk.algorithms import ScaleCom
from regtopk.simulate import Cluster

GRADS = torch.tensor([[6.0, 4.0, 1.0], [-4.0, 2.0, 8.0]])


def test_the_leader_changes_every_step_by_hand() -> None:
    cluster = Cluster(ScaleCom(k=1), num_workers=2)
    # worker 0 leads: entry 0.                          e_0 = (0, 4, 1), e_1 = (0, 2, 8)
    assert cluster.step(GRADS).tolist() == [(6 - 4) / 2, 0.0, 0.0]
    # worker 1 leads: a_1 = (0, 2, 8), entry 2.         e_0 = (0, 4, 0), e_1 = (0, 2, 0)
    assert cluster.step(torch.zeros(2, 3)).tolist() == [0.0, 0.0, (1 + 8) / 2]
    # worker 0 leads again: entry 1
    assert cluster.step(torch.zeros(2, 3)).tolist() == [0.0, (4 + 2) / 2, 0.0]


def test_the_low_pass_residual_by_hand() -> None:
    cluster = Cluster(ScaleCom(k=1, beta=0.25), num_workers=2)
    cluster.step(GRADS)  # entry 0: a - s * a = (0, 4, 1) and (0, 2, 8), of which a quarter is kept
    assert cluster.state is not None
    assert cluster.state.state_dict()["residual"].tolist() == [[0.0, 1.0, 0.25], [0.0, 0.5, 2.0]]
    # worker 1 leads: a_0 = (0, 1, 1.25), a_1 = (0, 0.5, 3), entry 2, (1.25 + 3) / 2
    assert cluster.step(torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])).tolist() == [0.0, 0.0, 2.125]
    # 0.75 e + 0.25 (a - s * a): entry 2 was sent, and still 0.75 of the old residual stays there
    expected = [[0.0, 0.75 * 1 + 0.25 * 1, 0.75 * 0.25], [0.0, 0.75 * 0.5 + 0.25 * 0.5, 0.75 * 2.0]]
    assert cluster.state.state_dict()["residual"].tolist() == expected


def test_a_worker_of_weight_zero_does_not_lead() -> None:
    cluster = Cluster(ScaleCom(k=1), num_workers=3, weights=[0.0, 0.5, 0.5])
    grads = torch.tensor([[9.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]])
    assert [cluster.step(grads).argmax().item() for _ in range(3)] == [1, 2, 1]


def test_only_the_leader_sends_indices() -> None:
    cluster = Cluster(ScaleCom(k=40), num_workers=2)
    cluster.step(torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)))
    leader, other = cluster.last_step.payload_bytes.tolist()
    # a frame, 40 fields of floor(log2(1000 / 40)) = 4 bits in 5 words, 40 + (999 >> 4) = 102 unary bits in 4
    assert leader - other == 32 + 4 * 5 + 4 * 4
    assert other == 32 + 4 * 40  # one region, 40 values
    assert cluster.last_step.num_entries.tolist() == [40, 40]
