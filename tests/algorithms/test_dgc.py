"""Deep Gradient Compression: its equations by hand, and the warm-up."""

import pytest
import torch

from regtopk.algorithms import DGC, TopK
from regtopk.algorithms.posterior import PosteriorScore
from regtopk.core import WarmUp
from regtopk.simulate import Cluster
from tests.algorithms.cases import random_grads, state_of


def momentum_and_residual(cluster: Cluster) -> tuple[list[float], list[float]]:
    state = state_of(cluster)
    return state["momentum"][0].tolist(), state["residual"][0].tolist()


def test_momentum_correction_and_factor_masking_by_hand() -> None:
    cluster = Cluster(DGC(k=1, momentum=0.5), num_workers=1)
    grads = torch.tensor([[4.0, 2.0, 0.0]])
    # u = (4, 2, 0), v = (4, 2, 0): entry 0 is sent, and zeroed in both
    assert cluster.step(grads).tolist() == [4.0, 0.0, 0.0]
    assert momentum_and_residual(cluster) == ([0.0, 2.0, 0.0], [0.0, 2.0, 0.0])
    # u = (4, 1 + 2, 0), v = (4, 2 + 3, 0): entry 1
    assert cluster.step(grads).tolist() == [0.0, 5.0, 0.0]
    assert momentum_and_residual(cluster) == ([4.0, 0.0, 0.0], [4.0, 0.0, 0.0])
    # u = (2 + 4, 2, 0), v = (4 + 6, 2, 0): entry 0, which waited one step with its momentum
    assert cluster.step(grads).tolist() == [10.0, 0.0, 0.0]


def test_local_clipping_by_hand() -> None:
    cluster = Cluster(DGC(k=2, momentum=0.0, clip=5.0), num_workers=4)
    # each may have the norm 5 / sqrt(4) = 2.5: (6, 8) of norm 10 becomes a quarter, (1.5, 2) of 2.5 stays
    grads = torch.tensor([[6.0, 8.0], [1.5, 2.0], [0.0, 0.0], [-0.6, 0.8]])
    expected = torch.tensor([[1.5, 2.0], [1.5, 2.0], [0.0, 0.0], [-0.6, 0.8]]).sum(0) / 4
    assert cluster.step(grads).tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_without_momentum_it_is_topk() -> None:
    dgc, topk = (Cluster(x, num_workers=4) for x in (DGC(k=7, momentum=0.0), TopK(k=7)))
    for grads in random_grads(20):
        assert torch.equal(dgc.step(grads), topk.step(grads))


def test_regtopk_score_looks_at_the_corrected_momentum() -> None:
    cluster = Cluster(DGC(k=1, momentum=0.5, score=PosteriorScore(mu=1.0)), num_workers=2)
    # entry 0 is sent by both and cancels
    assert cluster.step(torch.tensor([[6.0, 2.0, 0.0], [-6.0, 0.0, 2.0]])).tolist() == [0.0, 0.0, 0.0]
    # worker 0: u = (6, 1, 0), v = (6, 3, 0), entry 0 has factor 0: entry 1. worker 1 likewise: entry 2
    second = cluster.step(torch.tensor([[6.0, 0.0, 0.0], [-6.0, 0.0, 0.0]]))
    assert second.tolist() == [0.0, 3.0 / 2, 3.0 / 2]


def test_the_warm_up_of_the_paper() -> None:
    warm_up = WarmUp(density=0.001, num_steps=400)
    stages = [warm_up(step) for step in (0, 99, 100, 200, 300, 399, 400, 10**6)]
    # 0.25 · 0.004^(i / 4); the paper has 0.25, 0.0625, 0.015625, 0.004 and 0.001
    assert stages == pytest.approx([0.25, 0.25, 0.0629, 0.0158, 0.00398, 0.00398, 0.001, 0.001], rel=0.01)
    cluster = Cluster(DGC(density=WarmUp(density=0.1, num_steps=2, num_stages=2, start=0.4)), num_workers=4)
    for grads, k in zip(random_grads(3), [60, 30, 15], strict=True):
        cluster.step(grads)
        assert cluster.last_step.num_entries.tolist() == [k] * 4
    named = "WarmUp(density=0.1, num_steps=2, start=0.4, num_stages=2)"
    assert cluster.algorithm.options()["density"] == named
