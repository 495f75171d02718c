"""RegTop-k: hand-worked cases, its limits, and the paper's Algorithm 1 written out entry by entry."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regtopk.algorithms import RegTopK, TopK
from regtopk.simulate import Cluster
from tests.algorithms.cases import random_grads

READINGS = ["previous", "current"]
MUS = [1e-30, 1e-3, 1.0, 4.0, 1e6, 1e30]


def two_workers(weights: list[float] | None = None, **options: Any) -> Callable[..., list[float]]:
    """A step of a two-worker cluster on lists of numbers."""
    cluster = Cluster(RegTopK(**{"k": 1, **options}), num_workers=2, weights=weights)

    def step(*grads: list[float]) -> list[float]:
        aggregate: list[float] = cluster.step(torch.tensor(grads)).tolist()
        return aggregate

    return step


@pytest.mark.parametrize("mu", MUS)
def test_an_exactly_cancelled_entry_gets_factor_zero(mu: float) -> None:
    step = two_workers(mu=mu)
    # t = 0: both send entry 0, 4/2 - 4/2 = 0.             e_0 = (0, 1, 2), e_1 = (0, 3, 1)
    assert step([4.0, 1.0, 2.0], [-4.0, 3.0, 1.0]) == [0.0, 0.0, 0.0]
    # t = 1: a_0 = (5, 2, 3), a_1 = (-5, 4, 2). Entry 0: 1 + D = 0 / (w a) = 0, so tanh(0) = 0 at every mu:
    # scores (0, 2, 3) and (0, 4, 2). Worker 0 sends entry 2 and worker 1 entry 1, where Top-k stalls.
    assert step([5.0, 1.0, 1.0], [-5.0, 1.0, 1.0]) == [0.0, 4.0 / 2, 3.0 / 2]


@pytest.mark.parametrize(
    ("reference", "aggregate"), [("previous", [0.75, 3.75, 0.0]), ("current", [6.75, 0.0, 0.0])]
)
def test_both_readings_by_hand(reference: str, aggregate: list[float]) -> None:
    step = two_workers([0.75, 0.25], mu=1.0, reference=reference)
    # t = 0: both send entry 0, g = 0.75 · 4 - 0.25 · 4 = 2.              e_0 = (0, 1, 0) = e_1
    assert step([4.0, 1.0, 0.0], [-4.0, 1.0, 0.0]) == [2.0, 0.0, 0.0]
    # t = 1: a_0 = (8, 5, 0), a_1 = (3, 2, 0), and for entry 0:
    #
    # previous   worker 0: 1 + D = 2 / 3,            tanh = 0.583, 8 · 0.583 = 4.66 < 5: sends entry 1
    #            worker 1: 1 + D = 2 / -1 = -2,      tanh = 0.964, 3 · 0.964 = 2.89 > 2: sends entry 0
    #            g = (0.25 · 3, 0.75 · 5, 0)
    # current    worker 0: 1 + D = (6 + 2 - 3) / 6,  tanh = 0.682, 8 · 0.682 = 5.46 > 5: sends entry 0
    #            worker 1: 1 + D = (0.75 + 2 + 1) / 0.75 = 5, tanh = 1.000, 3 > 2:       sends entry 0
    #            g = (0.75 · 8 + 0.25 · 3, 0, 0)
    assert step([8.0, 4.0, 0.0], [3.0, 1.0, 0.0]) == aggregate


@pytest.mark.parametrize("mu", MUS)
def test_current_damps_to_zero_what_would_cancel_now(mu: float) -> None:
    step = two_workers(mu=mu, reference="current")
    # t = 0: both send entry 0, g = 4/2 - 2/2 = 1.                         e_0 = (0, 0.5, 0)
    assert step([4.0, 0.5, 0.0], [-2.0, 0.0, 1.0]) == [1.0, 0.0, 0.0]
    # t = 1, worker 0: a = (2, 0.5, 0), w a^t + g - w a^{t-1} = 1 + 1 - 2 = 0: entry 0 is out.
    #        worker 1: a = (0, 0, 2): entry 0 has score 0, entry 2 is sent.
    assert step([2.0, 0.0, 0.0], [0.0, 0.0, 1.0]) == [0.0, 0.5 / 2, 2.0 / 2]


@pytest.mark.parametrize("reference", READINGS)
def test_an_entry_that_is_zero_now_has_score_zero(reference: str) -> None:
    step = two_workers(reference=reference)
    assert step([4.0, 0.0, 0.0], [3.0, 0.0, 0.0]) == [3.5, 0.0, 0.0]
    # a_0 = (0, 1e-30, 0): in `current`, D divides by zero. Entry 1 must still win.
    assert step([0.0, 1e-30, 0.0], [0.0, 0.0, 1e-30]) == pytest.approx([0.0, 5e-31, 5e-31], rel=1e-6)


@pytest.mark.parametrize("reference", READINGS)
def test_an_entry_sent_as_zero_counts_as_not_sent(reference: str) -> None:
    step = two_workers(k=2, mu=1.0, reference=reference)
    # t = 0: worker 0 sends entry 0 (4) and a second one, which is zero: of equals, entry 1 or 2.
    #        worker 1 sends entries 1 (6) and 2 (6), so the aggregate is not zero where worker 0 sent zero.
    assert step([4.0, 0.0, 0.0], [0.0, 6.0, 6.0]) == [2.0, 3.0, 3.0]
    # t = 1: worker 0 has a = (0, 3, 2): entries 1 and 2 with factor 1, no NaN and no infinite factor.
    #        worker 1 has a = (1, 0, 0): entry 0, and one of the zeros.
    assert step([0.0, 3.0, 2.0], [1.0, 0.0, 0.0]) == [0.5, 1.5, 1.0]


def test_a_finite_q_is_the_factor_of_all_other_entries() -> None:
    # t = 0 as in the two readings: worker 1 has |1 + D| = 2 on entry 0. t = 1: a_1 = (4, 5, 0), mu = 1.
    # q = inf: 4 tanh(2) = 3.86 < 5, entry 1.      q = 0: 4 tanh(2) = 3.86 > 5 tanh(1) = 3.81, entry 0.
    for q, aggregate in ((math.inf, [0.75, 1.25, 0.0]), (0.0, [1.75, 0.0, 0.0])):
        step = two_workers([0.75, 0.25], mu=1.0, q=q)
        assert step([4.0, 1.0, 0.0], [-4.0, 1.0, 0.0]) == [2.0, 0.0, 0.0]
        # worker 0: a_0 = (1, 0.5, 0), |1 + D| = 2/3: 0.583 against 0.5, or against 0.5 tanh(1) = 0.381
        assert step([1.0, -0.5, 0.0], [4.0, 4.0, 0.0]) == aggregate


def test_a_cap_by_hand() -> None:
    step = two_workers([0.75, 0.25], mu=2.0, damping="cap")
    # t = 0: both send entry 0, g = 0.75 · 4 - 0.25 · 4 = 2, so its cap is 1.   e_0 = (0, 1, 0) = e_1
    assert step([4.0, 1.0, 0.0], [-4.0, 1.0, 0.0]) == [2.0, 0.0, 0.0]
    # t = 1: a_0 = (8, -1.5, 0), a_1 = (0.5, 0.25, 0). Scores: worker 0 (1, 1.5, 0), worker 1 (0.5, 0.25, 0).
    assert step([8.0, -2.5, 0.0], [0.5, -0.75, 0.0]) == [0.125, -1.125, 0.0]


def test_caps_are_the_same_on_all_workers_and_ties_go_to_the_first() -> None:
    # Both entries cancel to 0.25 at t = 0, so both have the cap 0.0625 on every worker, whatever it holds.
    weights = [0.5, 0.3, 0.2]
    cluster = Cluster(RegTopK(k=2, damping="cap"), num_workers=3, weights=weights)
    sent = torch.tensor([[4.0, 4.0, 0.0], [-5.0, -5.0, 0.0], [-1.25, -1.25, 0.0]])
    assert cluster.step(sent).tolist() == pytest.approx([0.25, 0.25, 0.0])
    now = torch.tensor([[1.0, 2.0, 9.0], [8.0, 1.0, 9.0], [1.0, 3.0, 9.0]])
    aggregate = cluster.step(now)
    assert aggregate[1] == 0 and aggregate[0] != 0 and aggregate[2] == pytest.approx(9.0)


@pytest.mark.parametrize("reference", READINGS)
def test_the_first_iteration_is_topk(reference: Any) -> None:
    (grads,) = random_grads(1)
    regularized = RegTopK(k=7, reference=reference, q=0.3)
    expected = Cluster(TopK(k=7), num_workers=4).step(grads)
    assert torch.equal(Cluster(regularized, num_workers=4).step(grads), expected)


@pytest.mark.parametrize("reference", READINGS)
def test_a_vanishing_mu_is_topk(reference: Any) -> None:
    algorithms = RegTopK(k=7, mu=1e-30, reference=reference), TopK(k=7), RegTopK(k=7, reference=reference)
    regularized, plain, damped = (Cluster(algorithm, num_workers=4) for algorithm in algorithms)
    differs = False
    for grads in random_grads(50):
        aggregate = regularized.step(grads)
        assert torch.equal(aggregate, plain.step(grads))
        assert int((aggregate != 0).sum()) >= 7  # no sent entry is exactly cancelled
        differs |= not torch.equal(aggregate, damped.step(grads))
    assert differs  # at mu = 4 the same gradients are not sent as by Top-k
    assert regularized.state is not None and plain.state is not None
    assert torch.equal(regularized.state.state_dict()["residual"], plain.state.state_dict()["residual"])


@pytest.mark.parametrize("reference", READINGS)
@pytest.mark.parametrize("q", [math.inf, 1e8, 2.0, 0.0, -0.9])
def test_the_algorithm_as_the_paper_has_it(reference: Any, q: float) -> None:
    weights, k, mu = [0.5, 0.3, 0.2], 4, 1.5
    cluster = Cluster(RegTopK(k=k, mu=mu, q=q, reference=reference), num_workers=3, weights=weights)
    paper = PaperWorkers(weights, k, reference, lambda x: np.tanh(x / mu), np.tanh((1 + q) / mu))
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        grads = torch.randn(3, 12, generator=generator, dtype=torch.float64) + 0.3
        assert cluster.step(grads).tolist() == paper.step(grads).tolist()


class PaperWorkers:
    """Algorithm 1 on full vectors: D has all J entries, Q where nothing was sent."""

    def __init__(
        self, weights: list[float], k: int, reference: str, u: Callable[[Any], Any], factor_of_q: float
    ) -> None:
        self.weights, self.k, self.reference = weights, k, reference
        self.u, self.factor_of_q = u, factor_of_q
        self.error: list[Any] = [0.0] * len(weights)
        self.last: list[Any] = [None] * len(weights)  # a^{t-1} and the mask s^{t-1}
        self.aggregate: Any = None

    def step(self, grads: Tensor) -> Any:
        aggregate = np.zeros(grads.shape[-1])
        for n, weight in enumerate(self.weights):
            a = self.error[n] + grads[n].numpy()
            factor = np.full(a.shape, self.factor_of_q)
            if self.last[n] is not None:
                last_a, last_s = self.last[n]
                reference = last_a if self.reference == "previous" else a
                distortion = (self.aggregate - weight * last_a) / (weight * reference)
                factor[last_s] = self.u(np.abs(1 + distortion[last_s]))
            s = np.zeros(a.shape, dtype=bool)
            s[np.argsort(np.abs(a) * factor)[-self.k :]] = True
            aggregate += np.where(s, weight * a, 0.0)
            self.error[n] = np.where(s, 0.0, a)
            self.last[n] = (a, s)
        self.aggregate = aggregate
        return aggregate


def test_a_factor_too_large_for_float32_is_still_no_nan() -> None:
    # 1 + D = (1e9 + 1e-30) / 1e-30 = 1e39, and C = tanh(1 / 1e300): the factor is 1e39, above float32.
    step = two_workers(mu=1e300, q=0.0)
    assert step([1e-30, 0.0], [1e9, 0.0]) == [5e8, 0.0]
    # a_0 = (0, 1): the score of entry 0 is 0 · factor = 0, so entry 1 is sent.
    assert step([0.0, 1.0], [0.0, 1.0]) == [0.0, 1.0]
