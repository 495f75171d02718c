import torch

from regtopk.algorithms import Strom
from regtopk.core.codes import message_bytes
from regtopk.simulate import Cluster


def test_strom_by_hand() -> None:
    cluster = Cluster(Strom(tau=1.0), num_workers=2)
    # worker 0 sends +1 for entry 0 and -1 for entry 2, worker 1 nothing.      e_0 = (1.5, -0.5, 0)
    grads = torch.tensor([[2.5, -0.5, -1.0], [0.25, 0.75, 0.0]])
    assert cluster.step(grads).tolist() == [0.5, 0.0, -0.5]
    # a_0 = (1.5, -1.25, 0): + - ., a_1 = (0.25, 1, 0): . + .                  e_0 = (0.5, -0.25, 0)
    grads = torch.tensor([[0.0, -0.75, 0.0], [0.0, 0.25, 0.0]])
    assert cluster.step(grads).tolist() == [0.5, 0.0, 0.0]
    assert cluster.last_step.num_entries.tolist() == [2, 1]
    assert cluster.state is not None
    assert cluster.state.state_dict()["residual"].tolist() == [[0.5, -0.25, 0.0], [0.25, 0.0, 0.0]]


def test_a_sign_costs_a_bit_and_a_share_of_two_floats() -> None:
    numel, count = 100_000, 1000
    grads = torch.zeros(1, numel)
    grads[0, ::100] = torch.tensor([3.0, -2.0]).repeat(count // 2)
    cluster = Cluster(Strom(tau=1.0), num_workers=1)
    cluster.step(grads)
    indices = message_bytes(torch.tensor(count), numel, dtype=torch.float32, value_code="none")
    bits = 8 * int(cluster.last_step.payload_bytes - indices) / count
    assert bits == 32 * (32 + 2 * 8) / count  # 1000 bits are 32 words, and 8 blocks have two scales: 1.5 bits
