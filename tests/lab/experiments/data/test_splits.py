import pytest
import torch

from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data import splits

SHUFFLE = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(10).repeat_interleave(100)[SHUFFLE]


@pytest.mark.parametrize("split", ["iid", "sorted", "sorted:1", "dirichlet:0.1", "dirichlet:100"])
def test_every_example_goes_to_one_worker_and_seeds_differ(split: str) -> None:
    parts, other, again = (splits.divide(LABELS, 8, split, seed) for seed in (0, 1, 0))
    assert len(parts) == 8 and min(map(len, parts)) > 0
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1000))
    assert torch.equal(torch.cat(parts), torch.cat(again))
    assert not torch.equal(torch.cat(parts), torch.cat(other))


def test_sorted_workers_see_few_labels() -> None:
    def counts(split: str) -> list[int]:
        return [len(LABELS[part].unique()) for part in splits.divide(LABELS, 8, split, seed=0)]

    assert max(counts("sorted:1")) <= 3 and max(counts("sorted")) <= 4 and min(counts("iid")) == 10
    for part in splits.divide(LABELS, 8, "sorted", seed=3):
        assert len(part) in (124, 125, 126)
        assert int((LABELS[part].diff() != 0).sum()) <= 3  # two shards, each sorted and of two labels at most


def test_weights_are_sizes_where_they_differ_by_intention() -> None:
    parts = splits.divide(LABELS, 4, "dirichlet:0.1", 0)
    assert splits.weights_of(parts, "dirichlet:0.1") == [len(part) / 1000 for part in parts]
    for split in ("iid", "sorted", "sorted:3"):  # 1000 is no multiple of 3
        assert splits.weights_of(splits.divide(LABELS, 3, split, 0), split) == [1 / 3] * 3


@pytest.mark.parametrize(("split", "least"), [("iid", 8), ("sorted", 16), ("dirichlet", 8)])
def test_too_few_examples_are_refused(split: str, least: int) -> None:
    assert min(map(len, splits.divide(LABELS[:least], 8, split, seed=0))) > 0
    with pytest.raises(ArgumentError, match=f"need at least {least} examples, got {least - 1}"):
        splits.divide(LABELS[: least - 1], 8, split, seed=0)


@pytest.mark.parametrize("alpha", ["1e-4", "1e-8"])
def test_the_smallest_alpha_gives_each_label_to_one_worker(alpha: str) -> None:
    parts = splits.divide(LABELS, 4, f"dirichlet:{alpha}", seed=0)
    shares = torch.stack([LABELS[part].bincount(minlength=10) for part in parts]) / 100
    assert float(shares.max(0).values.min()) > 0.98  # but for the one example of a worker without any


@pytest.mark.parametrize("alpha", [0.1, 2.0])
def test_shares_have_the_mean_and_variance_of_a_dirichlet_distribution(alpha: float) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.stack([splits.dirichlet_shares(5, alpha, generator) for _ in range(4000)])
    variance = (1 / 5) * (4 / 5) / (5 * alpha + 1)
    assert torch.allclose(drawn.mean(0), torch.full((5,), 0.2, dtype=torch.float64), atol=0.02)
    assert torch.allclose(drawn.var(0), torch.full((5,), variance, dtype=torch.float64), rtol=0.1)


def test_batches_pass_over_all_examples_before_one_comes_again() -> None:
    parts = [torch.arange(0, 10), torch.arange(10, 16)]
    order = splits.batch_order(parts, batch_size=4, num_steps=5, seed=0)
    assert order.shape == (5, 2, 4)
    assert set(order[:, 0].flatten()[:10].tolist()) == set(range(10))
    assert set(order[:, 1].flatten()[6:12].tolist()) == set(range(10, 16))


@pytest.mark.parametrize(
    "split", ["dirichlet:0", "dirichlet:x", "dirichlet:inf", "sorted:0", "sorted:1.5", "iid:3"]
)
def test_nonsense_is_refused(split: str) -> None:
    with pytest.raises(ArgumentError, match=r"split must be .*, got '.*\(did you mean"):
        splits.check_split(split)
