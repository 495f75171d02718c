"""Fairness-aware Top-k: supports and trials worked by hand."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from regtopk.algorithms import FairTopK
from regtopk.algorithms.fair_topk import FairTopKState
from regtopk.errors import ArgumentError
from regtopk.simulate import Cluster

# In descending order, worker 0's entries are 0, 1, 2, ... and worker 1's are 1, 3, 4, ...
GRADS = torch.tensor([[9.0, 8, 7, 0.2, 0, 0.1], [0.0, 9, 0.2, -8, 7, 0]])


@pytest.mark.parametrize(
    ("k", "support"),
    [
        (1, [0]),  # kappa = 0, and of the first choices 0 and 1 that of worker 0
        (2, [0, 1]),  # kappa = 1
        (3, [0, 1, 3]),  # kappa = 2: {0, 1} and {1, 3}
        (4, [0, 1, 2, 3]),  # kappa = 2, and of the third choices 2 and 4 that of worker 0
        (5, [0, 1, 2, 3, 4]),
    ],
)
def test_the_support_is_a_union_of_equal_rights(k: int, support: list[int]) -> None:
    cluster = Cluster(FairTopK(k=k), num_workers=2)
    aggregate = cluster.step(GRADS)
    assert aggregate.nonzero().flatten().tolist() == support
    assert torch.equal(aggregate[support], GRADS.mean(0)[support])


def test_another_worker_is_first_every_step() -> None:
    cluster = Cluster(FairTopK(k=1), num_workers=2)
    supports = [cluster.step(GRADS).nonzero().flatten().tolist() for _ in range(2)]
    assert supports == [[0], [1]]  # in step 1 entry 1 is worker 1's first choice, 9 + 9


def test_every_worker_has_its_share_however_small_its_gradient() -> None:
    grads = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    grads *= torch.tensor([1e6, 1e3, 1.0, 1e-3]).unsqueeze(-1)
    cluster = Cluster(FairTopK(k=10), num_workers=4)
    support = set(cluster.step(grads).nonzero().flatten().tolist())
    for grad in grads:
        assert support.issuperset(grad.abs().topk(10 // 4).indices.tolist())


def learner(**options: Any) -> Cluster:
    return Cluster(
        FairTopK(**{"k": 20, "min_density": 0.1, "max_density": 0.5, "trial": 2, **options}), num_workers=2
    )


def run(cluster: Cluster, reports: Sequence[tuple[float, float] | None]) -> list[int]:
    """One step before each report and one after the last; the k of each."""
    grads = torch.randn(len(reports) + 1, 2, 100, generator=torch.Generator().manual_seed(0))
    all_k = []
    for grad, report in zip(grads, [*reports, None], strict=True):
        cluster.step(grad)
        all_k.append(int(cluster.last_step.num_entries[0]) // 2)  # k indices and k values
        if report is not None:
            cluster.report(loss=report[0], time_s=report[1])
    return all_k


def state_of(cluster: Cluster) -> FairTopKState:
    assert isinstance(cluster.state, FairTopKState)
    return cluster.state


# delta_1 = (50 - 10) / sqrt 2 = 28.28, so k' = max(10, 20 - 14.14) = 10
SLOWER_BELOW = [(4.0, 1.0), (3.0, 1.0), (3.0, 1.0), (2.5, 1.0)]  # tau = 2 / 1, and 2 / 0.5 of k'
FASTER_BELOW = [(4.0, 1.0), (3.0, 1.0), (3.0, 0.4), (2.5, 0.4)]  # 2 / 1, and 0.8 / 0.5
NO_DECREASE = [(4.0, 1.0), (3.0, 1.0), (3.0, 0.4), (3.5, 0.4)]


def test_k_grows_where_more_entries_pay() -> None:
    cluster = learner()
    assert run(cluster, SLOWER_BELOW) == [20, 20, 10, 10, 48]  # 20 + 28.28
    assert float(state_of(cluster).k) == pytest.approx(20 + 40 / 2**0.5)
    # the second trial: delta_2 = 40 / 2 = 20, k' = 48.28 - 10, and tau favours it: k = 48.28 - 20
    cluster.report(loss=4.0, time_s=1.0)
    assert run(cluster, FASTER_BELOW[1:]) == [48, 38, 38, 28]


def test_k_shrinks_where_fewer_entries_pay_and_stays_in_its_range() -> None:
    cluster = learner()
    assert run(cluster, FASTER_BELOW) == [20, 20, 10, 10, 10]  # 20 - 28.28 is below the least k
    # at the least k the neighbour is above: k' = 10 + 20 / 2, and it is slower: k stays
    cluster.report(loss=4.0, time_s=1.0)
    assert run(cluster, [(3.0, 1.0), (3.0, 2.0), (2.9, 2.0)]) == [10, 20, 20, 10]


def test_k_stays_without_a_decrease_or_a_report() -> None:
    cluster = learner()
    assert run(cluster, NO_DECREASE) == [20, 20, 10, 10, 20]
    assert int(state_of(cluster).num_trials) == 1
    silent = learner()
    assert run(silent, [None] * 9) == [20] * 10


def test_a_trial_goes_on_where_a_report_is_missing() -> None:
    reports = [SLOWER_BELOW[0], None, *SLOWER_BELOW[1:3], None, SLOWER_BELOW[3]]
    assert run(learner(), reports) == [20, 20, 20, 10, 10, 10, 48]


def test_k_must_begin_in_its_range() -> None:
    cluster = learner(k=60)
    text = r"^k must be within min_density and max_density, 10\.\.50 of J = 100 entries, got 60$"
    with pytest.raises(ArgumentError, match=text):
        cluster.step(torch.ones(2, 100))
