from typing import Any

import pytest
import torch

from regtopk.algorithms import RegTopK, TopK
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.experiment import silent
from regtopk.lab.experiments.paper.fig2 import FIG2, METHODS, Curves, Descent, Fig2Config, make_problems
from regtopk.lab.runs import Record

SMALL = Fig2Config(num_seeds=2, num_iterations=30, record_every=20, num_workers=5, numel=12, num_points=40)


def records_of(config: Fig2Config) -> list[Record]:
    return list(FIG2.run(config, silent))


def final_distances(config: Fig2Config) -> dict[str, dict[str, list[float]]]:
    summary = FIG2.summarise(config, records_of(config))
    distances: dict[str, dict[str, list[float]]] = summary["final_distance"]
    return distances


def test_optimum_is_where_the_mean_gradient_vanishes() -> None:
    problems = make_problems(SMALL)
    at_optimum = problems.grads(problems.optimum.unsqueeze(1))
    assert at_optimum.shape == (2, 1, 5, 12)
    assert at_optimum.abs().max() > 0.1  # the workers disagree
    assert at_optimum.mean(2).abs().max() < 1e-12


def test_gradients_of_least_squares() -> None:
    config = Fig2Config(num_workers=3, numel=4, num_points=10)
    problems = make_problems(config)
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
    first = final_distances(Fig2Config(**{**vars(SMALL), "num_seeds": 1}))
    for method in METHODS:
        for density, distances in both[method].items():
            assert distances[0] == pytest.approx(first[method][density][0], rel=1e-9)
            assert distances[0] != distances[1]


def test_full_density_is_dense() -> None:
    distances = final_distances(Fig2Config(**{**vars(SMALL), "densities": (1.0,)}))
    for method in METHODS:
        assert distances[method]["1.0"] == pytest.approx(distances["dense"]["1.0"], rel=1e-9)


def test_records_and_progress() -> None:
    fractions: list[float] = []
    records = list(FIG2.run(SMALL, lambda fraction, words="": fractions.append(fraction)))
    assert sorted({record["iteration"] for record in records}) == [0, 20, 30]
    assert len(records) == 3 * len(METHODS) * 3  # iterations, methods, densities
    assert fractions[0] == 0 and fractions[-1] == 1 and fractions == sorted(fractions)


def test_thread_count_is_given_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        records_of(SMALL)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_table_shows_only_numbers_of_the_summary() -> None:
    config = Fig2Config(**{**vars(SMALL), "num_seeds": 1})
    summary = FIG2.summarise(config, records_of(config))
    shown = {row["measure"]: row["topk"] for row in summary["table"]}
    assert shown["S = 0.4, distance"] == summary["final_distance"]["topk"]["0.4"][0]
    assert shown["S = 0.4, following"] == f"{summary['num_tracking_dense']['topk']['0.4']}/1"


FOUR = "dense,topk,regtopk,regtopk-cap"
LONG = Fig2Config(seeds="1-1", methods=FOUR, num_iterations=4000, record_every=500, densities=(0.6,))


def test_a_seed_at_density_06_and_beyond() -> None:
    """At iteration 2,500 RegTop-k follows dense; by 4,000 it has jumped away, and with a cap it has not."""
    records = records_of(LONG)
    states = {(r["method"], r["iteration"]): r for r in records}
    assert states["dense", 2500]["distance"][0] < 1e-8 and states["topk", 2500]["distance"][0] > 1e-3
    following = {"dense": 1, "topk": 0, "regtopk": 1, "regtopk-cap": 1}
    assert {method: states[method, 2500]["following"] for method in following} == following
    assert {method: states[method, 4000]["following"] for method in following} == following | {"regtopk": 0}
    jumps = {
        method: counts["0.6"][0] for method, counts in FIG2.summarise(LONG, records)["num_jumps"].items()
    }
    assert jumps.pop("regtopk") > 0 and not any(jumps.values())


def test_in_float32_a_factor_jumps_soon_and_a_cap_does_not() -> None:
    theirs = {"num_iterations": 1000, "dtype": "float32", "loss": "mse", "start": "linear"}
    config = Fig2Config(**{**vars(LONG), **theirs, "methods": "dense,regtopk,regtopk-cap"})
    jumps = FIG2.summarise(config, records_of(config))["num_jumps"]
    assert jumps["regtopk"]["0.6"][0] > 0 and jumps["regtopk-cap"]["0.6"][0] == jumps["dense"]["0.6"][0] == 0


def test_the_authors_guard_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is undone if its squared length is 100 times that of the last one kept, or 1e5 at first."""
    config = Fig2Config(numel=1, num_workers=2, num_points=3, lr=1.0, guard=True)
    table: Curves = {("regtopk", 1.0): RegTopK(density=1.0), ("topk", 1.0): TopK(density=1.0)}
    descent = Descent(config, make_problems(config), table)
    lengths = [400.0, 300.0, 30.0, 300.0, 290.0, 2.9, 29.1, 28.0]  # the first is too long for 1e5
    is_kept = [False, True, True, False, True, True, False, True]
    for cluster in descent.clusters:
        steps = iter(lengths)
        monkeypatch.setattr(cluster, "step", lambda grads, steps=steps: torch.full((1, 1), next(steps)))
    guarded, plain = 0.0, 0.0
    for length, kept in zip(lengths, is_kept, strict=True):
        descent.step()
        guarded, plain = guarded - length * kept, plain - length
        assert descent.models.flatten().tolist() == pytest.approx([guarded, plain])


def test_dense_may_run_alone() -> None:
    config = Fig2Config(**{**vars(SMALL), "methods": "dense"})
    assert {record["method"] for record in records_of(config)} == {"dense"}


def test_the_authors_loss_and_start() -> None:
    ours, theirs = make_problems(SMALL), make_problems(Fig2Config(**{**vars(SMALL), "loss": "mse"}))
    assert torch.equal(theirs.gram, 2 * ours.gram) and torch.equal(theirs.optimum, ours.optimum)
    start = make_problems(Fig2Config(**{**vars(SMALL), "start": "linear"})).start
    assert not ours.start.any() and bool((start != 0).all()) and float(start.abs().max()) <= 12**-0.5
    assert not torch.equal(start[0], start[1])


def test_seeds_may_be_chosen() -> None:
    both = make_problems(SMALL)
    second = make_problems(Fig2Config(**{**vars(SMALL), "num_seeds": 1, "seeds": "1-1"}))
    assert torch.equal(second.moment[0], both.moment[1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"methods": "dense,topkk"}, "methods must be one of .*, got 'topkk'"),
        ({"methods": "topk"}, "methods must be different, and dense among them, got 'topk'"),
        ({"methods": "dense,dense"}, "methods must be different"),
        ({"num_seeds": 2, "seeds": "5-6"}, "give num_seeds or seeds, got 2 and '5-6'"),
        ({"seeds": "5-3"}, "seeds must be a number of them, or different ones"),
        ({"loss": "square"}, "loss must be one of half, mse, got 'square'"),
        ({"start": "one"}, "start must be one of zero, linear, got 'one'"),
        ({"dtype": "float16"}, "dtype must be one of float64, float32, got 'float16'"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Fig2Config(**settings)
