"""Random subsets: distinct, the same for the same (seed, step), and uniform.

The seeds are fixed, so each test always gives the same answer; the false-alarm rate is how often a perfect
generator would fail it for other seeds.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import combinations, pairwise
from math import sqrt

import pytest
import torch

from regtopk.core.random import _NUM_ROUNDS, _permute, mix, random_sequence, random_subset


@pytest.mark.parametrize("numel", [1, 2, 3, 5, 8, 9, 64, 65, 1000, 2**20 + 1, 2**33 + 7, 2**40])
def test_entries_are_distinct_and_ascending(numel: int) -> None:
    for k in sorted({1, min(numel, 2), min(numel, 1000)}):
        for step in range(3):
            drawn = random_subset(numel, k, seed=11, step=step)
            assert drawn.dtype == torch.int64 and drawn.shape == (k,)
            assert int(drawn[0]) >= 0 and int(drawn[-1]) < numel
            assert bool((drawn.diff() > 0).all())


def test_the_draw_is_a_function_of_seed_and_step() -> None:
    def draw(seed: int, step: int) -> list[int]:
        drawn: list[int] = random_subset(10_000, 50, seed, step).tolist()
        return drawn

    assert draw(1, 2) == draw(1, 2)
    different = [draw(seed, step) for seed in (-1, 0, 1, 2, 2**40) for step in (0, 1, 2, 10**9)]
    assert len({tuple(drawn) for drawn in different}) == len(different)


def test_a_sequence_is_the_subset_in_random_order() -> None:
    """Any first entries of it are a subset as well: of 400, each of 4 entries leads 100 ± 8.7 times."""
    first = Counter(int(random_sequence(4, 3, seed=0, step=step)[0]) for step in range(400))
    assert all(abs(first[entry] - 100) <= 4 * 8.7 for entry in range(4))  # 4 sigma: 1 in 4000 by chance
    assert random_sequence(50, 20, 1, 2).sort().values.tolist() == random_subset(50, 20, 1, 2).tolist()


def test_the_draw_never_changes() -> None:
    """Resumed runs and clusters of mixed versions rely on these numbers."""
    assert [mix(), mix(0), mix(1, 2, 3), mix(-1)] == [
        0,
        16294208416658607535,
        7702586659592502839,
        16490336266968443936,
    ]
    assert random_subset(100, 5, seed=0, step=0).tolist() == [8, 54, 67, 76, 87]
    assert random_subset(2**35, 3, seed=7, step=9).tolist() == [1842059730, 10484644052, 17946888342]


@pytest.mark.parametrize(("numel", "k", "num_draws"), [(2, 1, 300), (3, 2, 300), (5, 2, 300), (16, 2, 1000)])
def test_every_subset_is_equally_likely(numel: int, k: int, num_draws: int) -> None:
    """Chi-square over all subsets: by chance, 1 in 300 that one of the four fails."""
    counts = Counter(tuple(random_subset(numel, k, i % 7, i // 7).tolist()) for i in range(num_draws))
    check_uniform(counts, combinations(range(numel), k))


def test_every_four_of_eight_are_equally_likely() -> None:
    """Chi-square over 70 subsets, 15,000 draws: by chance 1 in 900,000; 8 rounds instead of 16 fail it."""
    draws = [(i % 7, i // 7) for i in range(15_000)]
    keys = torch.tensor([[mix(seed, step, i) & 7 for i in range(_NUM_ROUNDS)] for seed, step in draws])
    drawn = _permute(torch.arange(4), 3, list(keys.split(1, dim=-1))).sort(-1).values
    assert drawn[:3].tolist() == [random_subset(8, 4, seed, step).tolist() for seed, step in draws[:3]]
    check_uniform(Counter(map(tuple, drawn.tolist())), combinations(range(8), 4))


def check_uniform(counts: Counter[tuple[int, ...]], subsets: Iterable[tuple[int, ...]]) -> None:
    """The chi-square statistic is at most 6 standard deviations above its mean."""
    observed = [counts.pop(subset, 0) for subset in subsets]
    assert not counts
    expected, freedom = sum(observed) / len(observed), len(observed) - 1
    chi2 = sum((count - expected) ** 2 / expected for count in observed)
    assert chi2 < freedom + 6 * sqrt(2 * freedom)


def test_large_draws_are_uniform() -> None:
    """J = 100,000, k = 1,000, 40 steps: neighbours, and what two steps share; by chance 1 in 1.7 million."""
    numel, k, num_steps = 100_000, 1000, 40
    drawn = torch.stack([random_subset(numel, k, seed=1, step=step) for step in range(num_steps)])
    # a pair of neighbours is taken with probability (k / J)^2, nearly Poisson with mean 400: 5 sigma
    num_neighbours = int((drawn.diff(dim=-1) == 1).sum())
    assert abs(num_neighbours - 400) < 5 * sqrt(400)
    # two steps share k^2 / J = 10 entries each, 39 pairs: mean 390
    num_shared = sum(int(torch.isin(left, right).sum()) for left, right in pairwise(drawn))
    assert abs(num_shared - 390) < 5 * sqrt(390)
