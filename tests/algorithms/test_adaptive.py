"""Adaptive density: its rules worked by hand, and that it reaches what it is told to."""

import math
from typing import Any

import pytest
import torch

from regtopk import ALGORITHMS, EF21, AdaptiveDensity, Consensus, GradientDropping, RegTopK, TopK
from regtopk.core import WithDensity
from regtopk.simulate import Cluster
from tests.algorithms.cases import WEIGHTS, J, N, normal, random_grads, residual_of

HAVE_DENSITY = {name: kind for name, kind in ALGORITHMS.items() if issubclass(kind, WithDensity)}


def density_of(cluster: Cluster) -> float:
    return float(cluster.state_dict()["state"]["density"])


def test_the_density_follows_the_error() -> None:
    algorithm = AdaptiveDensity(algorithm=TopK(k=1), target_error=0.2, every=1)
    cluster = Cluster(algorithm, num_workers=1)
    # k = 1 sends 2 of (2, 1, 1, 1): E = 3/7, E / (1 - E) = 3/4, and (1 - 0.2) / 0.2 = 4: by sqrt 3
    assert cluster.step(torch.tensor([[2.0, 1, 1, 1]])).count_nonzero() == 1
    assert density_of(cluster) == pytest.approx(0.25 * math.sqrt(3))
    # 0.433 · 4 = 1.7, so k = 2 of the (0, 1, 1, 1) that are left: E = 1/3, E / (1 - E) = 1/2: by sqrt 2
    assert cluster.step(torch.zeros(1, 4)).count_nonzero() == 2
    assert density_of(cluster) == pytest.approx(0.25 * math.sqrt(6))
    # and the last one is sent: E = 0, but the density is halved at most
    assert cluster.step(torch.zeros(1, 4)).count_nonzero() == 1
    assert density_of(cluster) == pytest.approx(0.125 * math.sqrt(6))
    # of nothing at all nothing is learnt
    assert cluster.step(torch.zeros(1, 4)).count_nonzero() == 0
    assert density_of(cluster) == pytest.approx(0.125 * math.sqrt(6))


def test_the_error_is_the_weighted_mean_of_the_workers() -> None:
    algorithm = AdaptiveDensity(algorithm=TopK(k=1), target_error=0.5, every=1)
    cluster = Cluster(algorithm, num_workers=2, weights=[0.75, 0.25])
    cluster.step(torch.tensor([[1.0, 1, 0, 0], [3.0, 0, 0, 0]]))  # E = 0.75 · 1/2 + 0.25 · 0 = 3/8
    assert density_of(cluster) == pytest.approx(0.25 * math.sqrt(3 / 5))


def test_the_density_follows_the_bytes() -> None:
    algorithm = AdaptiveDensity(algorithm=TopK(k=8), bytes_per_step=100.0, every=2)
    cluster = Cluster(algorithm, num_workers=2, index_code="raw32")
    grads = normal(3, 2, 64)
    cluster.step(grads[0])
    assert cluster.last_step.payload_bytes.tolist() == [96, 96]  # a frame of 32 bytes, and 8 an entry
    assert density_of(cluster) == 8 / 64
    cluster.step(grads[1])
    assert cluster.last_step.payload_bytes.tolist() == [132, 132]  # and 36 for a number, every second step
    # 96 + 18 bytes a step are 14 too many, of which 1.4 are to be saved from now on: k = 6.92
    assert density_of(cluster) == pytest.approx(8 / 64 * 98.6 / 114)
    cluster.step(grads[2])
    assert cluster.last_step.payload_bytes.tolist() == [88, 88]


@pytest.mark.parametrize(
    ("algorithm", "index_code"),
    [
        (RegTopK(density=0.3), "elias-fano"),
        (RegTopK(density=0.3), "rice"),
        (TopK(k=1, value_code="4bit"), "rice"),
        (Consensus(density=0.5, value_code="4bit"), "elias-fano"),
        (GradientDropping(density=0.001), "rice"),
        (EF21(density=0.4), "elias-fano"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_mean_payload_is_the_budget(algorithm: WithDensity[Any], index_code: str) -> None:
    adaptive = AdaptiveDensity(algorithm=algorithm, bytes_per_step=500.0, every=5)
    cluster = Cluster(adaptive, num_workers=4, index_code=index_code)
    for grads in normal(300, 4, 2000):  # what the first steps spent too much, or too little, is made up for
        cluster.step(grads)
    assert float(cluster.total.payload_bytes.double().mean()) / 300 == pytest.approx(500, rel=0.02)


@pytest.mark.parametrize("start", [0.01, 0.9])
def test_the_error_becomes_the_target(start: float) -> None:
    adaptive = AdaptiveDensity(algorithm=RegTopK(density=start), target_error=0.7, every=2)
    cluster = Cluster(adaptive, num_workers=4)
    errors, residual = [], torch.zeros(4, 500)
    for grads in normal(300, 4, 500):
        accumulated = residual + grads
        cluster.step(grads)
        residual = residual_of(cluster).clone()
        errors.append(float((residual.square().sum(-1) / accumulated.square().sum(-1)).mean()))
    assert sum(errors[200:]) / 100 == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize("inner", [RegTopK(density=0.1), Consensus(density=0.1, value_code="4bit")])
def test_with_one_density_allowed_it_is_the_algorithm_itself(inner: WithDensity[Any]) -> None:
    fixed = AdaptiveDensity(algorithm=inner, target_error=0.5, min_density=0.1, max_density=0.1, every=1)
    clusters = [Cluster(algorithm, num_workers=N, weights=WEIGHTS) for algorithm in (fixed, inner)]
    for grads in random_grads(4):
        first, second = (cluster.step(grads) for cluster in clusters)
        assert torch.equal(first, second)
    saved, own = (cluster.state_dict()["state"] for cluster in clusters)
    assert saved.pop("density") == torch.tensor(0.1)
    assert all(torch.equal(saved.pop(name), tensor) for name, tensor in own.items()) and not saved


@pytest.mark.parametrize("name", [name for name, kind in HAVE_DENSITY.items() if not kind.listens])
def test_any_algorithm_that_has_a_density_can_be_adapted(name: str) -> None:
    adaptive = AdaptiveDensity(algorithm=HAVE_DENSITY[name](density=0.5), bytes_per_step=150.0, every=1)
    cluster = Cluster(adaptive, num_workers=N, weights=WEIGHTS)
    for grads in random_grads(6):
        cluster.step(grads)
    assert density_of(cluster) != 0.5
    assert cluster.total.num_entries.sum() > 0


def test_it_starts_within_its_bounds() -> None:
    for start, first in ((0.001, 0.1), (0.3, 0.3), (1.0, 0.5)):
        adaptive = AdaptiveDensity(algorithm=TopK(density=start), min_density=0.1, max_density=0.5)
        cluster = Cluster(adaptive, num_workers=N)
        cluster.step(random_grads(1)[0])
        assert cluster.last_step.num_entries.tolist() == [round(first * J)] * N


def test_the_options_say_what_is_adapted() -> None:
    options = AdaptiveDensity(algorithm=TopK(k=3), bytes_per_step=10.0).options()
    assert options["algorithm"] == "TopK(density=None, k=3, value_code=float32, returned=None, impute=0.0)"
    assert AdaptiveDensity().options()["algorithm"].startswith("RegTopK(density=0.01, ")
