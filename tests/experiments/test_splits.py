import pytest
import torch

from regtopk.errors import ArgumentError
from regtopk.experiments.splits import batch_order, check_split, divide

SHUFFLE = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(10).repeat_interleave(100)[SHUFFLE]


@pytest.mark.parametrize("split", ["iid", "sorted", "sorted:1", "dirichlet:0.1", "dirichlet:100"])
def test_every_example_goes_to_one_worker(split: str) -> None:
    parts = divide(LABELS, 8, split, seed=0)
    assert len(parts) == 8 and min(map(len, parts)) > 0
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))


def test_sorted_workers_see_few_labels() -> None:
    assert max(len(LABELS[part].unique()) for part in divide(LABELS, 8, "sorted:1", seed=0)) <= 3
    assert max(len(LABELS[part].unique()) for part in divide(LABELS, 8, "sorted", seed=0)) <= 4
    assert min(len(LABELS[part].unique()) for part in divide(LABELS, 8, "iid", seed=0)) == 10


def test_a_small_alpha_makes_workers_differ() -> None:
    def largest_share(split: str) -> float:
        parts = divide(LABELS, 8, split, seed=0)
        return max(float(LABELS[p].bincount().max() / len(p)) for p in parts if len(p) > 20)

    assert largest_share("dirichlet:0.05") > 0.6 > 0.3 > largest_share("dirichlet:100")


def test_seeds_divide_differently_and_again_the_same() -> None:
    one, other, again = (divide(LABELS, 4, "sorted", seed=seed) for seed in (0, 1, 0))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_batches_pass_over_all_examples_before_one_comes_again() -> None:
    parts = [torch.arange(0, 10), torch.arange(10, 16)]
    order = batch_order(parts, batch_size=4, num_steps=5, seed=0)
    assert order.shape == (5, 2, 4)
    assert set(order[:, 0].flatten()[:10].tolist()) == set(range(10))
    assert set(order[:, 1].flatten()[6:12].tolist()) == set(range(10, 16))


@pytest.mark.parametrize("split", ["dirichlet:0", "dirichlet:x", "sorted:0", "sorted:1.5", "iid:3"])
def test_nonsense_is_refused(split: str) -> None:
    with pytest.raises(ArgumentError, match="split must be"):
        check_split(split)


def test_the_nearest_split_is_named() -> None:
    with pytest.raises(ArgumentError, match="did you mean 'dirichlet'"):
        check_split("dirichled:0.5")
