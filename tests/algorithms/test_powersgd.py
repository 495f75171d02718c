"""PowerSGD on matrices of known rank, what it sends, and what error feedback makes of the rest."""

import torch

from regtopk.algorithms import PowerSGD
from regtopk.core.worker import Layout
from regtopk.simulate import Cluster

LAYOUT = Layout.of_shapes([("matrix", (8, 12), "linear"), ("bias", (3,), "bias"), ("thin", (2, 9), "linear")])


def random_grads(num_workers: int) -> torch.Tensor:
    return torch.randn(num_workers, LAYOUT.numel, generator=torch.Generator().manual_seed(1))


def test_a_sum_of_the_factors_rank_arrives_whole() -> None:
    """Each worker's matrix has full rank, and their mean is of rank 2."""
    grads = random_grads(2)
    draw = torch.Generator().manual_seed(2)
    low = (torch.randn(8, 2, generator=draw) @ torch.randn(2, 12, generator=draw)).flatten()
    grads[1, :96] = 2 * low - grads[0, :96]
    aggregate = Cluster(PowerSGD(rank=2), num_workers=2, layout=LAYOUT).step(grads)
    torch.testing.assert_close(aggregate, grads.mean(0), rtol=1e-4, atol=1e-4)


def test_factors_and_what_is_too_small_for_them_are_sent() -> None:
    """Rank 1: 8 and 12 numbers for the matrix; 3 of the vector, and 18 of a matrix of 2 (2 + 9) > 18.

    Each of two sums has two regions, with a frame of 16 bytes.
    """
    cluster = Cluster(PowerSGD(rank=1), num_workers=2, layout=LAYOUT)
    cluster.step(random_grads(2))
    assert cluster.last_step.payload_bytes.tolist() == [4 * (8 + 12 + 3 + 18) + 4 * 16] * 2


def test_later_steps_send_what_earlier_ones_left() -> None:
    grads = random_grads(3)
    cluster = Cluster(PowerSGD(rank=1), num_workers=3, layout=LAYOUT)
    aggregates = torch.stack([cluster.step(grads) for _ in range(400)])
    error = (aggregates - grads.mean(0)).norm(dim=-1) / grads.mean(0).norm()
    assert error[0] > 0.4
    assert (aggregates.mean(0) - grads.mean(0)).norm() / grads.mean(0).norm() < 0.05
