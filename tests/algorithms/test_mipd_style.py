"""Layer budgets worked by hand."""

import pytest
import torch

from regtopk.algorithms import MIPDStyle
from regtopk.algorithms.mipd_style import layer_budgets
from regtopk.core.worker import Layout
from regtopk.simulate import Cluster

LAYOUT = Layout.of_shapes([("wide", (4,), "other"), ("narrow", (2,), "other")])


@pytest.mark.parametrize(
    ("accumulated", "k", "budgets"),
    [
        ([4, -2, 1, 1, 3, -1], 3, [2, 1]),  # means 2 and 2: a density of 3/6 for both
        ([4, -2, 1, 1, 0.3, -0.1], 3, [3, 0]),  # means 2 and 0.2: c = 3 / 8.4, so 2.86 and 0.14 entries
        ([1, 1, 1, 1, 10, 10], 3, [1, 2]),  # 3 · 10 / 24 > 1: the narrow one sends all, 1 is left for 4
        ([0, 0, 0, 0, 5, 5], 3, [1, 2]),  # what is left goes to entries that are zero
        ([0, 0, 0, 0, 0, 0], 3, [2, 1]),
        ([7, 1, 0, 0, 0, 9], 6, [4, 2]),
    ],
)
def test_budgets_follow_the_mean_magnitude(accumulated: list[float], k: int, budgets: list[int]) -> None:
    assert layer_budgets(torch.tensor(accumulated), list(LAYOUT.layers), k).tolist() == budgets


def test_one_step() -> None:
    """Worker 0 sends 4 and -2 of the wide layer and 3 of the narrow one, worker 1 one and two."""
    cluster = Cluster(MIPDStyle(k=3, decay=0.5), num_workers=2, layout=LAYOUT)
    aggregate = cluster.step(torch.tensor([[4.0, -2, 1, 1, 3, -1], [1, 3, 1, 1, -20, 10]]))
    assert aggregate.tolist() == [2.0, 0.5, 0.0, 0.0, -8.5, 5.0]
    # left are (0, 0, 1, 1, 0, -1) and (1, 0, 1, 1, 0, 0), and next time half of it: 0.5 of means 0.25 and
    # 0.25 in worker 0, of means 0.375 and 0 in worker 1, that is (2, 1) and (3, 0) entries
    aggregate = cluster.step(torch.zeros(2, 6))
    assert aggregate.tolist() == [0.25, 0.0, 0.5, 0.5, 0.0, -0.25]
