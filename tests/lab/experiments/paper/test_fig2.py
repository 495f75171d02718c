import pytest
import torch

from regtopk.lab.experiments.experiment import silent
from regtopk.lab.experiments.paper.fig2 import FIG2, METHODS, Fig2Config, regressions_of
from regtopk.lab.runs import Record

SMALL = Fig2Config(seeds="2", num_iterations=30, record_every=20, num_workers=5, numel=12, num_points=40)


def records_of(config: Fig2Config) -> list[Record]:
    return list(FIG2.run(config, silent))


def final_distances(config: Fig2Config) -> dict[str, dict[str, list[float]]]:
    summary = FIG2.summarise(config, records_of(config))
    distances: dict[str, dict[str, list[float]]] = summary["final_distance"]
    return distances


def test_optimum_is_where_the_mean_gradient_vanishes() -> None:
    problems = regressions_of(SMALL)
    at_optimum = problems.grads(problems.optimum.unsqueeze(1))
    assert at_optimum.shape == (2, 1, 5, 12)
    assert at_optimum.abs().max() > 0.1  # the workers disagree
    assert at_optimum.mean(2).abs().max() < 1e-12


def test_gradients_of_least_squares() -> None:
    problems = regressions_of(Fig2Config(num_workers=3, numel=4, num_points=10))
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(3, 10, 4, generator=generator, dtype=torch.float64)
    means = 5**0.5 * torch.randn(3, 1, generator=generator, dtype=torch.float64)
    truths = means + torch.randn(3, 4, generator=generator, dtype=torch.float64)
    noise = 0.5**0.5 * torch.randn(3, 10, generator=generator, dtype=torch.float64)
    w = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    error = (points @ w) - (torch.einsum("ndj,nj->nd", points, truths) + noise)
    expected = torch.einsum("ndj,nd->nj", points, error) / 10
    torch.testing.assert_close(problems.grads(w.view(1, 1, 4))[0, 0], expected)


def test_a_batch_of_seeds_is_the_seeds_one_by_one() -> None:
    both = final_distances(SMALL)
    first = final_distances(Fig2Config(**{**vars(SMALL), "seeds": "1"}))
    for method in METHODS:
        for density, distances in both[method].items():
            assert distances[0] == pytest.approx(first[method][density][0], rel=1e-9)
            assert distances[0] != distances[1]


def test_records_and_progress() -> None:
    fractions: list[float] = []
    records = list(FIG2.run(SMALL, lambda fraction, words="": fractions.append(fraction)))
    assert sorted({record["iteration"] for record in records}) == [0, 20, 30]
    assert len(records) == 3 * len(METHODS) * 3 and fractions == [0, 20 / 30, 1]


LONG = Fig2Config(seeds="1-1", num_iterations=900, record_every=100, densities=(0.6,), lr=0.05)


def test_a_seed_at_density_06_and_beyond() -> None:
    """At iteration 500 RegTop-k follows dense; by 900 it has jumped away, and with a cap it has not.

    The figure's own learning rate is a fifth of this one, and takes five times as many iterations.
    """
    records = records_of(LONG)
    states = {(r["method"], r["iteration"]): r for r in records}
    assert states["dense", 500]["distance"][0] < 1e-8 and states["topk", 500]["distance"][0] > 1e-3
    following = {"dense": 1, "topk": 0, "regtopk": 1, "regtopk-cap": 1}
    assert {method: states[method, 500]["following"] for method in following} == following
    assert {method: states[method, 900]["following"] for method in following} == following | {"regtopk": 0}
    num_jumps = FIG2.summarise(LONG, records)["num_jumps"]
    jumps = {method: num_jumps[method]["0.6"][0] for method in following}
    assert jumps.pop("regtopk") > 0 and not any(jumps.values())
