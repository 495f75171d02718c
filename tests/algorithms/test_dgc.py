"""Deep Gradient Compression: its equations by hand, the sampled threshold, and the warm-up."""

import math
from typing import Any

import pytest
import torch

from regtopk.algorithms import DGC, TopK
from regtopk.algorithms.posterior import PosteriorScore
from regtopk.core.warm_up import WarmUp
from regtopk.core.worker import Layout
from regtopk.errors import ArgumentError
from regtopk.simulate import Cluster
from tests.algorithms.cases import random_grads


def state_of(cluster: Cluster) -> tuple[list[float], list[float]]:
    assert cluster.state is not None
    state = cluster.state.state_dict()
    return state["momentum"][0].tolist(), state["residual"][0].tolist()


def test_momentum_correction_and_factor_masking_by_hand() -> None:
    cluster = Cluster(DGC(k=1, momentum=0.5), num_workers=1)
    grads = torch.tensor([[4.0, 2.0, 0.0]])
    # u = (4, 2, 0), v = (4, 2, 0): entry 0 is sent, and zeroed in both
    assert cluster.step(grads).tolist() == [4.0, 0.0, 0.0]
    assert state_of(cluster) == ([0.0, 2.0, 0.0], [0.0, 2.0, 0.0])
    # u = (4, 1 + 2, 0), v = (4, 2 + 3, 0): entry 1
    assert cluster.step(grads).tolist() == [0.0, 5.0, 0.0]
    assert state_of(cluster) == ([4.0, 0.0, 0.0], [4.0, 0.0, 0.0])
    # u = (2 + 4, 2, 0), v = (4 + 6, 2, 0): entry 0, which waited one step with its momentum
    assert cluster.step(grads).tolist() == [10.0, 0.0, 0.0]


def test_the_momentum_of_what_is_sent_late_is_that_of_sgd() -> None:
    """An entry that waits T steps has gathered what momentum SGD would have moved it by in T steps."""
    cluster = Cluster(DGC(k=1, momentum=0.5), num_workers=1)
    for _ in range(4):
        cluster.step(torch.tensor([[100.0, 1.0]]))  # entry 1 waits
    # u: 1, 1.5, 1.75, 1.875; v is their sum
    assert state_of(cluster)[1] == [0.0, 1 + 1.5 + 1.75 + 1.875]


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


def test_a_sampled_threshold_sends_about_k() -> None:
    """Also when residuals pile up below the threshold: always 0.8 k to 1.3 k of distinct magnitudes."""
    algorithm = DGC(k=200, selection="sampled", sample=0.05)
    cluster = Cluster(algorithm, num_workers=4)
    counts = set()
    for grads in random_grads(40, 4, 20_000):
        cluster.step(grads)
        counts |= set(cluster.last_step.num_entries.tolist())
    assert min(counts) >= 0.8 * 200 and max(counts) <= 1.3 * 200
    assert len(counts) > 5


def test_with_a_sample_of_everything_and_one_step_it_is_exact() -> None:
    (grads,) = random_grads(1)
    sampled = Cluster(DGC(k=20, selection="sampled", sample=1.0), num_workers=4)
    assert torch.equal(sampled.step(grads), Cluster(DGC(k=20), num_workers=4).step(grads))


def test_equal_entries_do_not_overflow_a_sampled_message() -> None:
    cluster = Cluster(DGC(k=10, selection="sampled"), num_workers=2)
    cluster.step(torch.ones(2, 1000))
    assert cluster.last_step.num_entries.tolist() == [13, 13]  # 1.3 k of 1000 equal ones
    cluster = Cluster(DGC(k=10, selection="sampled"), num_workers=2)
    cluster.step(torch.zeros(2, 1000))
    assert cluster.last_step.num_entries.tolist() == [0, 0]


def test_regtopk_score_looks_at_the_corrected_momentum() -> None:
    cluster = Cluster(DGC(k=1, momentum=0.5, score=PosteriorScore(mu=1.0)), num_workers=2)
    # entry 0 is sent by both and cancels
    assert cluster.step(torch.tensor([[6.0, 2.0, 0.0], [-6.0, 0.0, 2.0]])).tolist() == [0.0, 0.0, 0.0]
    # worker 0: u = (6, 1, 0), v = (6, 3, 0), entry 0 has factor 0: entry 1. worker 1 likewise: entry 2
    second = cluster.step(torch.tensor([[6.0, 0.0, 0.0], [-6.0, 0.0, 0.0]]))
    assert second.tolist() == [0.0, 3.0 / 2, 3.0 / 2]


LAYOUT = Layout.of_shapes(
    [
        ("matrix", (1, 3), "linear"),
        ("scalar", (), "other"),
        ("bias", (2,), "bias"),
        ("last", (2, 1), "linear"),
    ]
)


def test_vectors_sent_dense_by_hand() -> None:
    cluster = Cluster(DGC(k=1, momentum=0.5, dense_vectors=True), num_workers=2, layout=LAYOUT)
    grads = torch.tensor([[4.0, 2, 0, 9, -8, 7, 0, 1], [0.0, 2, 0, 1, 0, 7, 8, 0]])
    # the scalar and the bias by all: 9 + 1, -8 + 0, 7 + 7. Of the rest 4 by worker 0 and 8 by worker 1
    assert cluster.step(grads).tolist() == [2.0, 0.0, 0.0, 5.0, -4.0, 7.0, 4.0, 0.0]
    assert cluster.last_step.num_entries.tolist() == [1 + 3, 1 + 3]
    # dense entries keep their momentum and have no residual; what was sent of the rest has neither
    momentum, residual = state_of(cluster)
    assert momentum == [0.0, 2.0, 0.0, 9.0, -8.0, 7.0, 0.0, 1.0]
    assert residual == [0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    # u = 0.5 u there; of the rest v is 2 + 1 of entry 1 in both workers
    assert cluster.step(torch.zeros(2, 8)).tolist() == [0.0, 3.0, 0.0, 2.5, -2.0, 3.5, 0.0, 0.0]


def test_vectors_sent_dense_have_the_momentum_of_sgd() -> None:
    cluster = Cluster(DGC(k=3, momentum=0.9, dense_vectors=True), num_workers=4, layout=Layout.anonymous(20))
    momentum = torch.zeros(20)
    for grads in random_grads(10, 4, 20):  # one vector and no matrix: nothing is selected
        momentum = 0.9 * momentum + grads.mean(0)
        torch.testing.assert_close(cluster.step(grads), momentum)
        assert cluster.last_step.num_entries.tolist() == [20] * 4


def test_without_vectors_nothing_is_sent_dense() -> None:
    layout = Layout.of_shapes([("matrix", (10, 15), "linear")])
    one, other = (
        Cluster(DGC(k=7, dense_vectors=is_dense), num_workers=4, layout=layout) for is_dense in (True, False)
    )
    for grads in random_grads(5):
        assert torch.equal(one.step(grads), other.step(grads))
    assert one.last_step.num_entries.tolist() == [7] * 4


def test_the_warm_up_of_the_paper() -> None:
    warm_up = WarmUp(density=0.001, num_steps=400)
    stages = [warm_up(step) for step in (0, 99, 100, 200, 300, 399, 400, 10**6)]
    # 0.25 · 0.004^(i / 4); the paper has 0.25, 0.0625, 0.015625, 0.004 and 0.001
    assert stages == pytest.approx([0.25, 0.25, 0.0629, 0.0158, 0.00398, 0.00398, 0.001, 0.001], rel=0.01)
    cluster = Cluster(DGC(density=WarmUp(density=0.1, num_steps=2, num_stages=2, start=0.4)), num_workers=4)
    for grads, k in zip(random_grads(3), [60, 30, 15], strict=True):
        cluster.step(grads)
        assert cluster.last_step.num_entries.tolist() == [k] * 4
    assert (
        cluster.algorithm.options()["density"] == "WarmUp(density=0.1, num_steps=2, start=0.4, num_stages=2)"
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"momentum": 1.0}, "momentum must be in [0, 1), got 1.0"),
    ({"momentum": -0.1}, "momentum must be in [0, 1), got -0.1"),
    ({"momentum": math.nan}, "momentum must be in [0, 1), got nan"),
    ({"momentum": True}, "momentum must be in [0, 1), got True"),
    ({"clip": 0.0}, "clip must be None or a finite norm > 0, got 0.0"),
    ({"clip": math.inf}, "clip must be None or a finite norm > 0, got inf"),
    ({"selection": "topk"}, "selection must be one of exact, sampled, got 'topk'"),
    ({"dense_vectors": 1}, "dense_vectors must be True or False, got 1"),
    ({"sample": 0}, "sample must be in (0, 1], got 0"),
    ({"score": 4.0}, "score must be None (magnitude) or a PosteriorScore, got 4.0"),
    (
        {"score": PosteriorScore(), "selection": "sampled"},
        "selection must be 'exact' with a score, got 'sampled'",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_break_their_rule_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        DGC(k=1, **options)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density must be in (0, 1], got 0.0"),
        ({"start": 1.5}, "start must be in (0, 1], got 1.5"),
        ({"num_steps": 0}, "num_steps must be an integer of at least 1, got 0"),
        ({"num_stages": 2.0}, "num_stages must be an integer of at least 1, got 2.0"),
    ],
)
def test_a_warm_up_that_breaks_its_rule_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        WarmUp(**{"density": 0.001, "num_steps": 10, **options})
    assert str(refused.value) == message
