"""Random subsets: distinct, the same for the same (seed, step), and uniform; rounding at random; exact sums.

The seeds are fixed, so each test always gives the same answer; the false-alarm rate is how often a perfect
generator would fail it for other seeds.
"""

from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations, pairwise
from math import sqrt

import pytest
import torch

from regtopk.core.exact import exact_sum
from regtopk.core.precision import round_at_random
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
        0, 16294208416658607535, 7702586659592502839, 16490336266968443936,
    ]  # fmt: skip
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


def test_sums_are_those_of_rationals() -> None:
    """Within the rounding of 1000 entries to 2^-52 of the power of two above the largest, 2^7."""
    x = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1.5, 1000)
    for row, total in zip(x, exact_sum(x), strict=True):
        true = sum(map(Fraction, row.tolist()), Fraction(0))
        assert abs(Fraction(float(total)) - true) <= 500 * Fraction(2) ** (7 - 52)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_neither_order_nor_batch_matter(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(3, 100_000, generator=generator) * torch.logspace(-20, 20, 100_000)).to(dtype)
    total = exact_sum(x)
    assert total.dtype == torch.float64
    assert torch.equal(exact_sum(x[:, torch.randperm(100_000, generator=generator)]), total)
    assert torch.equal(torch.stack([exact_sum(row) for row in x]), total)


@pytest.mark.parametrize("size", [1e-250, 1e-40, 1.0, 1e38, 1e300])
def test_any_size_and_zeros(size: float) -> None:
    x = torch.tensor([3.0, 0.0, -1.0], dtype=torch.float64) * size
    assert float(exact_sum(x)) == pytest.approx(2 * size, rel=1e-12)
    assert exact_sum(torch.zeros(2, 5)).tolist() == [0.0, 0.0]


def test_a_number_becomes_one_of_its_neighbours_and_itself_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(2000, generator=generator) * torch.logspace(-6, 6, 2000)
    rounded = torch.stack([round_at_random(vector, torch.tensor(1), step) for step in range(2000)]).double()
    assert ((rounded - vector).abs() <= 2.0**-7 * vector.abs()).all()
    standard_error = 2.0**-8 * vector.abs() / 2000**0.5  # at most: half the distance of the neighbours
    off = (rounded.mean(0) - vector) / standard_error
    assert off.abs().max() < 5 and abs(off.mean()) < 4 / 2000**0.5


def test_what_bfloat16_holds_stays_as_it_is() -> None:
    vector = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-126, 3.0e38]).bfloat16().float()
    assert torch.equal(round_at_random(vector, torch.tensor(0), 3).float(), vector)


def test_workers_draw_apart_and_the_same_batched_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = torch.full((3, 10_001), 1 + 2.0**-9)
    batched = round_at_random(vector, torch.arange(3).unsqueeze(-1), 7)
    alone = [round_at_random(row, torch.tensor(n), 7) for n, row in enumerate(vector)]
    assert torch.equal(batched, torch.stack(alone)) and not torch.equal(alone[0], alone[1])
    monkeypatch.setattr("regtopk.core.precision._PIECE", 1 << 10)
    assert torch.equal(round_at_random(vector[1], torch.tensor(1), 7), alone[1])  # piece by piece
