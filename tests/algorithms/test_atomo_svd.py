"""Spectral ATOMO on matrices whose singular values are known, and what its messages hold."""

import pytest
import torch

from regtopk.algorithms import AtomoSVD
from regtopk.core.random import uniform
from regtopk.core.worker import Layout
from regtopk.errors import GradientError
from regtopk.simulate import Cluster

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
    with pytest.raises(
        GradientError, match=r"shape \(N, J\): 'atomo-svd' does not run replicas, got \(3, 2, 4\)"
    ):
        cluster.step(torch.ones(3, 2, 4))
    cluster.step(torch.ones(2, 4))  # the refused step has fixed nothing
