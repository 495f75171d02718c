"""EF21: its equations by hand, plain, with momentum and both ways."""

import pytest
import torch

from regtopk.algorithms import EF21
from regtopk.simulate import Cluster
from tests.algorithms.cases import Steps

GRADS: list[list[float]] = [[4, 2, 0], [-2, 1, 6]]
BY_HAND = Steps(
    EF21(k=1),
    [
        # h = 0: the largest changes are entry 0 (4) and entry 2 (6).     h_0 = (4, 0, 0), h_1 = (0, 0, 6)
        (GRADS, [2, 0, 3]),
        # the same gradients: changes (0, 2, 0) and (-2, 1, 0).           h_0 = (4, 2, 0), h_1 = (-2, 0, 6)
        (GRADS, [1, 1, 3]),
        # changes 0 and (0, 1, 0): now the aggregate is the mean gradient, and stays it
        (GRADS, [1, 1.5, 3]),
        (GRADS, [1, 1.5, 3]),
        # the first worker's entry 0 falls to 1: change -3
        ([[1, 2, 0], [-2, 1, 6]], [-0.5, 1.5, 3]),
    ],
)
# v = (2, 1): entry 0. Then v = 0.75 (2, 1) + 0.25 (0, 4) = (1.5, 1.75): changes (-0.5, 1.75), entry 1
MOMENTUM = Steps(EF21(k=1, eta=0.25), [([[8, 4]], [2, 0]), ([[0, 4]], [2, 1.75])])
# Entries 0 and 2 are the first worker's to sum, 1 and 3 the second's. Each sends back its largest sum.
BOTH_WAYS_GRADS: list[list[float]] = [[4, 2, 0, 0], [-2, 1, 6, 0]]
BOTH_WAYS = Steps(
    EF21(density=0.25, returned=0.25),
    [
        (BOTH_WAYS_GRADS, [0, 0, 3, 0]),  # of the sums 2 and 3, 3 comes back
        (BOTH_WAYS_GRADS, [1, 1, 3, 0]),  # entry 0: the 2 that is owed and half of -2; entry 1: half of 2
        (BOTH_WAYS_GRADS, [1, 1.5, 3, 0]),
        (BOTH_WAYS_GRADS, [1, 1.5, 3, 0]),
    ],
)


@pytest.mark.parametrize("case", [BY_HAND, MOMENTUM, BOTH_WAYS], ids=["plain", "momentum", "both ways"])
def test_by_hand(case: Steps) -> None:
    case.check()


def test_what_a_code_loses_is_sent_later() -> None:
    cluster = Cluster(EF21(k=2, value_code="2bit"), num_workers=1)
    grads = torch.tensor([[3.0, -1.0, 0.3, 0.1]])
    for _ in range(60):
        aggregate = cluster.step(grads)
    assert aggregate.tolist() == pytest.approx(grads[0].tolist(), abs=1e-5)
