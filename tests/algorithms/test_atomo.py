"""ATOMO's sequential rule worked by hand, and what a draw sends."""

import pytest
import torch

from regtopk.algorithms import Atomo
from regtopk.algorithms.atomo import keep_probability
from regtopk.core.random import uniform
from regtopk.simulate import Cluster


@pytest.mark.parametrize(
    ("magnitude", "s", "probability"),
    [
        ([5.0, 3.0, 1.0, 1.0], 2, [1.0, 0.6, 0.2, 0.2]),  # 2 · 5 / 10 is exactly 1: no entry is taken out
        ([1.0, 8.0, 1.0], 2, [0.5, 1.0, 0.5]),  # 2 · 8 / 10 > 1: 8 is certain, then 1 · 1 / 2
        ([6.0, 1.0, 3.0], 2, [1.0, 0.25, 0.75]),  # 2 · 6 / 10 > 1, then 1 · 3 / 4 and 1 · 1 / 4
        ([100.0, 10.0, 1.0, 1.0], 3, [1.0, 1.0, 0.5, 0.5]),  # two are certain: 3 · 100 / 112, 2 · 10 / 12 > 1
        ([3.0, 1.0], 0.5, [0.375, 0.125]),  # 0.5 · 3 / 4: s need not be whole
        ([3.0, 1.0], 1.5, [1.0, 0.5]),  # 1.5 · 3 / 4 > 1, then 0.5 · 1 / 1
        ([2.0, 0.0, 2.0, 0.0], 1, [0.5, 0.0, 0.5, 0.0]),
        ([0.0, 0.0, 0.0], 2, [0.0, 0.0, 0.0]),
        ([3.0, 0.0], 2, [1.0, 1.0]),  # s = n: all
    ],
)
def test_the_sequential_rule(magnitude: list[float], s: float, probability: list[float]) -> None:
    found = keep_probability(torch.tensor(magnitude), s)
    torch.testing.assert_close(found, torch.tensor(probability, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("s", [0.3, 1, 7, 50, 149.5])
def test_probabilities_add_up_to_s(s: float) -> None:
    magnitude = torch.randn(3, 150, generator=torch.Generator().manual_seed(0)).square()
    total = keep_probability(magnitude, s).sum(-1)
    torch.testing.assert_close(total, torch.full((3,), float(s), dtype=torch.float64), rtol=1e-9, atol=0)


def test_what_is_drawn_is_sent_over_its_probability() -> None:
    grads = torch.tensor([[-6.0, 1.0, 3.0], [0.0, 0.0, -4.0]])
    cluster = Cluster(Atomo(k=2, seed=5), num_workers=2, weights=[0.25, 0.75])
    num_drawn = torch.zeros(2, 3)
    for step in range(30):
        drawn = uniform(torch.tensor([[0], [1]]), 5, step, 3) < torch.tensor([[1, 0.25, 0.75], [0, 0, 1]])
        # 6 / 1, 1 / 0.25 and 3 / 0.75, and of worker 1 always 4
        expected = 0.25 * drawn[0] * torch.tensor([-6.0, 4.0, 4.0]) + torch.tensor([0.0, 0.0, -3.0])
        assert torch.equal(cluster.step(grads), expected)
        assert cluster.last_step.num_entries.tolist() == drawn.sum(-1).tolist()
        num_drawn += drawn
    assert num_drawn[0, 0] == 30 and 0 < num_drawn[0, 1] < num_drawn[0, 2] < 30


def test_workers_draw_for_themselves() -> None:
    cluster = Cluster(Atomo(k=50), num_workers=2, weights=[1 / 3, 2 / 3])
    aggregate = cluster.step(torch.ones(2, 100))  # p = 1/2: 0, 2/3, 4/3 or 2, each a quarter of the entries
    counts = aggregate.mul(1.5).round().long().bincount(minlength=4)
    assert bool((counts > 10).all())
