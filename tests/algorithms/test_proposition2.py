"""The paper's Proposition 2 by Monte Carlo: which entries are likely to be among the k largest of the sum?

A worker of weight w = 1/2 holds a^t. The others hold z^t. All sent the k entries S last, so that the worker
knows z^{t-1} there. Elsewhere, where the proposition says nothing of them, they held nothing.

    current     z^t = z^{t-1} + xi                         the paper's model, and its distortion
    previous    z^t = z^{t-1} a^t / a^{t-1} + xi           our reading of the default distortion (docs/why.md)
    xi_j ~ N(0, (0.1 w |a_j^t|)^2)                         independent, symmetric, small against |a_j^t|

P_j, the integral of Propositions 1 and 2, is the share of draws of xi in which entry j is among the k
largest of |w a^t + z^t|. No k entries hit more of these than the k of the largest P: the MAP choice. *Hits*
are P summed over what the library sends, over the same sum of the MAP choice, which is made from other draws.
What is checked:

- "u_mu, a non-decreasing function of |1 + D|", and C: where all |a_j| are equal, the library's choice is the
  MAP choice for every mu, with C = u_mu(1). That is Q = 0: where nothing is known, nothing distorts.
- "times |a_j|": where they differ, it is the MAP choice for large mu, in the model of its own reading alone.
  As mu falls to 0, it becomes Top-k's.
- "proportional" holds for the order alone: P_j is a step in |a_j|, not a line.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import pytest
import torch
from torch import Tensor

from regtopk import RegTopK, TopK
from regtopk.simulate import Cluster
from tests.algorithms import cases

J, K, WEIGHT, NUM_DRAWS = 1000, 200, 0.5, 400
Reading = Literal["previous", "current"]
READINGS: list[Reading] = ["previous", "current"]


normal = partial(cases.normal, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Past:
    """What a worker held, and the others held, in step t - 1, and what it holds now."""

    held: Tensor  # a^{t-1}; the k largest are S
    others: Tensor  # z^{t-1}, zero off S
    now: Tensor  # a^t

    @classmethod
    def drawn(cls, now: Tensor) -> "Past":
        held = normal(J, seed=0)
        is_sent = torch.zeros(J, dtype=torch.bool).scatter_(0, held.abs().topk(K).indices, True)
        return cls(held, torch.where(is_sent, normal(J, seed=1), 0.0), now)

    @cache  # noqa: B019 - two of them live, as long as the tests
    def posterior(self, reading: str, seed: int = 4) -> Tensor:
        """P_j, in the model that a reading of the distortion stands for."""
        carried = self.others if reading == "current" else self.others * self.now / self.held
        innovations = 0.1 * WEIGHT * self.now.abs() * normal(NUM_DRAWS, J, seed=seed)
        largest = (WEIGHT * self.now + carried + innovations).abs().topk(K).indices
        return torch.bincount(largest.flatten(), minlength=J) / NUM_DRAWS

    def sent_by(self, algorithm: TopK | RegTopK) -> Tensor:
        """The entries that the worker sends in step t; all others together are a second worker."""
        cluster = Cluster(algorithm, num_workers=2, weights=[WEIGHT, 1 - WEIGHT])
        cluster.step(torch.stack([self.held, self.others / (1 - WEIGHT)]))
        residual = cases.residual_of(cluster)[0]
        cluster.step(torch.stack([self.now - residual, torch.zeros(J, dtype=torch.float64)]))
        is_sent = cases.residual_of(cluster)[0] == 0
        assert int(is_sent.sum()) == K
        return is_sent

    def hits(self, algorithm: TopK | RegTopK, reading: str) -> float:
        posterior, best = self.posterior(reading), self.posterior(reading, seed=5).topk(K).indices
        return float(posterior[self.sent_by(algorithm)].sum() / posterior[best].sum())


ALIKE = Past.drawn(normal(J, seed=2).sign())
DIFFERENT = Past.drawn(normal(J, seed=2))


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("mu", [0.5, 4.0, 1000.0])
def test_of_equal_entries_the_most_probable_are_sent(reading: Reading, mu: float) -> None:
    assert ALIKE.hits(RegTopK(k=K, mu=mu, q=0.0, reference=reading), reading) > 0.995


# As docs/why.md has them: Top-k, RegTop-k with Q = 0 and mu = 1, 4, 1000, and with Q = inf and mu = 4
HITS = {"previous": [0.89, 0.97, 1.00, 1.00, 0.79], "current": [0.69, 0.75, 0.88, 1.00, 0.57]}


@pytest.mark.parametrize("reading", READINGS)
def test_of_different_entries_a_large_mu_sends_the_most_probable(reading: Reading) -> None:
    choices = [RegTopK(k=K, mu=mu, q=0.0, reference=reading) for mu in (1.0, 4.0, 1000.0)]
    algorithms: list[TopK | RegTopK] = [TopK(k=K), *choices, RegTopK(k=K, reference=reading)]
    found = [DIFFERENT.hits(algorithm, reading) for algorithm in algorithms]
    assert found == pytest.approx(HITS[reading], abs=0.01)
    assert DIFFERENT.hits(RegTopK(k=K, mu=1e-30, q=0.0, reference=reading), reading) == found[0]
    (other,) = {*READINGS} - {reading}
    assert DIFFERENT.hits(choices[-1], other) < 0.8


def test_the_posterior_is_a_step_in_the_magnitude() -> None:
    """Of entries not sent last. Proportional to |a|, P would be below 0.04 for all of them: |a| < 3.4."""
    size, is_unsent = DIFFERENT.now.abs(), DIFFERENT.others == 0
    posterior = DIFFERENT.posterior("current")
    assert posterior[is_unsent & (size < 1.0)].max() < 0.01
    assert posterior[is_unsent & (size > 2.1)].min() > 0.98
