"""ATOMO's sequential rule worked by hand, and what a draw sends: of entries, and of singular vectors."""

import pytest
import torch

from regtopk.algorithms import Atomo, AtomoSVD
from regtopk.algorithms.atomo import keep_probability
from regtopk.core.random import uniform
from regtopk.core.worker import Layout
from regtopk.errors import GradientError
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


SQUARE = Layout.of_shapes([("square", (2, 2), "linear")])


def test_singular_vectors_are_drawn_by_their_singular_values() -> None:
    """G = diag(3, -1), J = k = 4: s = 1 · 4 / 4 = 1 and p = 3/4, 1/4; so 3 / p = 4, and 1 / p = 4."""
    grads = torch.tensor([[3.0, 0.0, 0.0, -1.0]])
    cluster = Cluster(AtomoSVD(k=4, seed=2), num_workers=1, layout=SQUARE)
    seen = set()
    for step in range(30):
        large, small = (uniform(torch.tensor(0), 2, step, 2) < torch.tensor([0.75, 0.25])).tolist()
        aggregate = cluster.step(grads)
        torch.testing.assert_close(aggregate, torch.tensor([4.0 * large, 0, 0, -4.0 * small]))
        # how many atoms, and u and v of each, in 4 bytes a number
        assert cluster.last_step.payload_bytes.tolist() == [4 * (1 + 4 * (large + small))]
        seen.add((large, small))
    assert seen == {(True, False), (True, True), (False, False), (False, True)}


def test_a_matrix_of_rank_one_is_one_certain_atom() -> None:
    """(1, 2) times (3, 0, 4): the only singular value is sqrt 5 · 5, and s = 1/2 · 8 · 6 / 14 > 1."""
    layout = Layout.of_shapes([("cube", (8, 2, 3), "conv")])
    u, v = torch.arange(1.0, 9.0), torch.tensor([3.0, 0.0, 4.0, 1.0, 0.0, 2.0])
    grads = torch.outer(u, v).flatten()
    cluster = Cluster(AtomoSVD(density=0.5), num_workers=2, layout=layout)
    aggregate = cluster.step(torch.stack([grads, -3 * grads]))
    torch.testing.assert_close(aggregate, -grads, rtol=1e-5, atol=1e-4)


def test_entries_of_vectors_are_drawn_one_by_one() -> None:
    layout = Layout.of_shapes([("bias", (4,), "bias"), ("square", (2, 2), "linear")])
    cluster = Cluster(AtomoSVD(k=2), num_workers=1, layout=layout)
    grads = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    for step in range(10):  # density 1/4: one of the 4 entries on average, p = 1/4
        drawn = uniform(torch.tensor(0), 0, step, 6)[:4] < 0.25
        assert cluster.step(grads).tolist() == [*(4.0 * drawn), 0.0, 0.0, 0.0, 0.0]


def test_replicas_are_refused() -> None:
    cluster = Cluster(AtomoSVD(k=1), num_workers=2, layout=SQUARE)
    with pytest.raises(GradientError, match=r"'atomo-svd' does not run replicas, got \(3, 2, 4\)$"):
        cluster.step(torch.ones(3, 2, 4))
    cluster.step(torch.ones(2, 4))  # the refused step has fixed nothing
