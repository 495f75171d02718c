"""EF21: its equations by hand, and Figure 2's regression, where it follows dense at any density."""

import pytest
import torch

from regtopk.algorithms import EF21, Dense
from regtopk.lab.experiments.paper.fig2 import Fig2Config, regressions_of
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


def test_it_follows_dense_on_figure_2_even_at_density_001() -> None:
    """Within ten times the distance, at twice the figure's learning rate and half of its iterations."""
    config = Fig2Config(lr=0.02, num_iterations=1250)
    problems = regressions_of(config)
    clusters = [Cluster(x, num_workers=config.num_workers) for x in (Dense(), EF21(density=0.01))]
    models = torch.zeros(1, 2, config.numel, dtype=torch.float64)
    for _ in range(config.num_iterations):
        grads = problems.grads(models)
        for i, cluster in enumerate(clusters):
            models[:, i] -= config.lr * cluster.step(grads[:, i])
    dense, ef21 = (models - problems.optimum.unsqueeze(1)).norm(dim=-1)[0].tolist()
    assert dense < 1e-4
    assert ef21 <= 10 * dense
