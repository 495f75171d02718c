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
from tests.algorithms.cases import Steps, normal, random_grads, residual_of

READINGS = ["previous", "current"]


def cancelled(mu: float) -> Steps:
    """At every mu an entry that cancelled exactly has factor tanh(0) = 0."""
    return Steps(
        RegTopK(k=1, mu=mu),
        [
            # t = 0: both send entry 0, 4/2 - 4/2 = 0.             e_0 = (0, 1, 2), e_1 = (0, 3, 1)
            ([[4, 1, 2], [-4, 3, 1]], [0, 0, 0]),
            # t = 1: a_0 = (5, 2, 3), a_1 = (-5, 4, 2). Entry 0: 1 + D = 0 / (w a) = 0: scores (0, 2, 3) and
            # (0, 4, 2). Worker 0 sends entry 2 and worker 1 entry 1, where Top-k stalls.
            ([[5, 1, 1], [-5, 1, 1]], [0, 4 / 2, 3 / 2]),
        ],
    )


def sent_as_zero(reference: Any) -> Steps:
    """It counts as not sent."""
    return Steps(
        RegTopK(k=2, mu=1.0, reference=reference),
        [
            # t = 0: worker 0 sends entry 0 (4) and a second one, which is zero: of equals, entry 1 or 2.
            # worker 1 sends entries 1 (6) and 2 (6), so the aggregate is not zero where worker 0 sent zero.
            ([[4, 0, 0], [0, 6, 6]], [2, 3, 3]),
            # t = 1: worker 0 has a = (0, 3, 2): entries 1 and 2 with factor 1, no NaN and no infinite factor.
            # worker 1 has a = (1, 0, 0): entry 0, and one of the zeros.
            ([[0, 3, 2], [1, 0, 0]], [0.5, 1.5, 1]),
        ],
    )


def zero_now(reference: Any) -> Steps:
    """a_0 = (0, 2^-100, 0): in `current`, D divides by zero. Entry 1 must still win."""
    least, half = 2.0**-100, 2.0**-101
    second = [[0, least, 0], [0, 0, least]], [0, half, half]
    return Steps(RegTopK(k=1, reference=reference), [([[4, 0, 0], [3, 0, 0]], [3.5, 0, 0]), second])


CAP = Steps(
    RegTopK(k=1, mu=2.0, damping="cap"),
    [
        # t = 0: both send entry 0, g = 0.75 · 4 - 0.25 · 4 = 2, so its cap is 1.   e_0 = (0, 1, 0) = e_1
        ([[4, 1, 0], [-4, 1, 0]], [2, 0, 0]),
        # t = 1: a_0 = (8, -1.5, 0), a_1 = (0.5, 0.25, 0). Scores: (1, 1.5, 0) and (0.5, 0.25, 0).
        ([[8, -2.5, 0], [0.5, -0.75, 0]], [0.125, -1.125, 0]),
    ],
    weights=[0.75, 0.25],
)
# 1 + D = (1e9 + 1e-30) / 1e-30 = 1e39, and C = tanh(1 / 1e300): the factor is 1e39, above float32. Then
# a_0 = (0, 1): the score of entry 0 is 0 · factor = 0, not NaN, so entry 1 is sent.
HUGE = Steps(RegTopK(k=1, mu=1e300, q=0.0), [([[1e-30, 0], [1e9, 0]], [5e8, 0]), ([[0, 1], [0, 1]], [0, 1])])


@pytest.mark.parametrize(
    "case",
    [
        *(cancelled(mu) for mu in (1e-30, 1e-3, 1.0, 4.0, 1e6, 1e30)),
        *(sent_as_zero(reference) for reference in READINGS),
        *(zero_now(reference) for reference in READINGS),
        CAP,
        HUGE,
    ],
    ids=str,
)
def test_by_hand(case: Steps) -> None:
    case.check()


def test_caps_are_the_same_on_all_workers_and_ties_go_to_the_first() -> None:
    # Both entries cancel to 0.25 at t = 0, so both have the cap 0.0625 on every worker, whatever it holds.
    cluster = Cluster(RegTopK(k=2, damping="cap"), num_workers=3, weights=[0.5, 0.3, 0.2])
    sent = torch.tensor([[4.0, 4.0, 0.0], [-5.0, -5.0, 0.0], [-1.25, -1.25, 0.0]])
    assert cluster.step(sent).tolist() == pytest.approx([0.25, 0.25, 0.0])
    aggregate = cluster.step(torch.tensor([[1.0, 2.0, 9.0], [8.0, 1.0, 9.0], [1.0, 3.0, 9.0]]))
    assert aggregate[1] == 0 and aggregate[0] != 0 and aggregate[2] == pytest.approx(9.0)


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
    assert torch.equal(residual_of(regularized), residual_of(plain))


@pytest.mark.parametrize("reference", READINGS)
@pytest.mark.parametrize("q", [math.inf, 1e8, 2.0, 0.0, -0.9])
def test_the_algorithm_as_the_paper_has_it(reference: Any, q: float) -> None:
    weights, k, mu = [0.5, 0.3, 0.2], 4, 1.5
    cluster = Cluster(RegTopK(k=k, mu=mu, q=q, reference=reference), num_workers=3, weights=weights)
    paper = PaperWorkers(weights, k, reference, lambda x: np.tanh(x / mu), np.tanh((1 + q) / mu))
    for grads in normal(40, 3, 12, seed=2, dtype=torch.float64) + 0.3:
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
