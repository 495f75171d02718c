"""Steps worked out by hand, of algorithms whose equations are short."""

import pytest
import torch

import regtopk
from regtopk.algorithms.mipd_style import layer_budgets
from regtopk.core import Layout, Peek, Worker
from regtopk.simulate import Cluster
from tests.algorithms.cases import Steps

CONV_LINEAR = Layout.of_shapes([("conv", (4,), "conv"), ("linear", (3,), "linear")])
WIDE_NARROW = Layout.of_shapes([("wide", (4,), "other"), ("narrow", (2,), "other")])
OF_EF21: list[list[float]] = [[4, 2, 0], [-2, 1, 6]]
BOTH_WAYS: list[list[float]] = [[4, 2, 0, 0], [-2, 1, 6, 0]]

BY_HAND = [
    # 6/4 - 18/4, 4/4 + 12/4, 1/4 + 6/4
    Steps(regtopk.Dense(), [([[6, 4, 1], [-6, 4, 2]], [-3, 4, 1.75])], weights=[0.25, 0.75]),
    Steps(
        regtopk.TopK(k=1),
        [
            # both send entry 0: 6/2 - 6/2 = 0.                      e_0 = (0, 4, 1), e_1 = (0, 4, 2)
            ([[6, 4, 1], [-6, 4, 2]], [0, 0, 0]),
            # a_0 = (1, 4, 5): entry 2. a_1 = (1, 6, 5): entry 1.    e_0 = (1, 4, 0), e_1 = (1, 0, 5)
            ([[1, 0, 4], [1, 2, 3]], [0, 3, 2.5]),
            # nothing new: a_0 = (1, 4, 0), entry 1; a_1 = (1, 0, 5), entry 2
            ([[0, 0, 0], [0, 0, 0]], [0, 2, 2.5]),
        ],
    ),
    Steps(
        regtopk.GlobalTopK(k=1),
        [
            # a = (0, 4, 1.5): entry 1.                              e_0 = (6, 0, 1), e_1 = (-6, 0, 2)
            ([[6, 4, 1], [-6, 4, 2]], [0, 4, 0]),
            # a = ((7 - 5) / 2, (0 + 2) / 2, (4 + 5) / 2): entry 2
            ([[1, 0, 3], [1, 2, 3]], [0, 0, 4.5]),
            # a = ((7 - 15) / 2, 1, 0): entry 0, the largest by magnitude
            ([[0, 0, 0], [-10, 0, 0]], [-4, 0, 0]),
        ],
    ),
    Steps(
        regtopk.HardThreshold(k=4),  # lambda = 1 / (2 · 2) = 0.25.     e = (0, -0.125, 0, 0, 0)
        [
            ([[0.25, -0.125, 0.5, 0, -0.375]], [0.25, 0, 0.5, 0, -0.375]),
            ([[0, -0.125, 0.125, 0, 0]], [0, -0.25, 0, 0, 0]),
        ],
    ),
    Steps(
        regtopk.HardThreshold(threshold=2.0),
        [([[2, -3, 1], [1, 1, 1]], [1, -1.5, 0]), ([[1, 1, 1], [1, 1, 1]], [1, 1, 2])],
    ),
    Steps(
        regtopk.ScaleCom(k=1),
        [
            # worker 0 leads: entry 0.                          e_0 = (0, 4, 1), e_1 = (0, 2, 8)
            ([[6, 4, 1], [-4, 2, 8]], [(6 - 4) / 2, 0, 0]),
            # worker 1 leads: a_1 = (0, 2, 8), entry 2.         e_0 = (0, 4, 0), e_1 = (0, 2, 0)
            ([[0, 0, 0], [0, 0, 0]], [0, 0, (1 + 8) / 2]),
            # worker 0 leads again: entry 1
            ([[0, 0, 0], [0, 0, 0]], [0, (4 + 2) / 2, 0]),
        ],
    ),
    Steps(
        regtopk.ScaleCom(k=1, beta=0.25),
        [
            # entry 0: a - s * a = (0, 4, 1) and (0, 2, 8), of which a quarter is kept
            ([[6, 4, 1], [-4, 2, 8]], [1, 0, 0]),
            # worker 1 leads: a_0 = (0, 1, 1.25), a_1 = (0, 0.5, 3), entry 2, (1.25 + 3) / 2
            ([[0, 0, 1], [0, 0, 1]], [0, 0, 2.125]),
        ],
        # 0.75 e + 0.25 (a - s * a): entry 2 was sent, and still 0.75 of the old residual stays there
        residual=[[0, 0.75 * 1 + 0.25 * 1, 0.75 * 0.25], [0, 0.75 * 0.5 + 0.25 * 0.5, 0.75 * 2]],
    ),
    Steps(
        regtopk.Strom(tau=1.0),
        [
            # worker 0 sends +1 for entry 0 and -1 for entry 2, worker 1 nothing.      e_0 = (1.5, -0.5, 0)
            ([[2.5, -0.5, -1], [0.25, 0.75, 0]], [0.5, 0, -0.5]),
            # a_0 = (1.5, -1.25, 0): + - ., a_1 = (0.25, 1, 0): . + .                  e_0 = (0.5, -0.25, 0)
            ([[0, -0.75, 0], [0, 0.25, 0]], [0.5, 0, 0]),
        ],
        residual=[[0.5, -0.25, 0], [0.25, 0, 0]],
    ),
    Steps(
        regtopk.Dryden(density=0.5),
        [
            # half of 4 positives: 8, 4, of mean 6; half of 2 negatives: -6
            ([[8, 4, 1, 0.5, -6, -3, 0, 0]], [6, 6, 0, 0, -6, 0, 0, 0]),
            # a = (2, -2, 1, 0.5, 0, -3, 0, 0): 1.5 of 3 positives rounds to 2: 2, 1, of mean 1.5; of 2
            # negatives -3
            ([[0] * 8], [1.5, 0, 1.5, 0, 0, -3, 0, 0]),
        ],
        residual=[[0.5, -2, -0.5, 0.5, 0, 0, 0, 0]],
    ),
    # worker 0: 1 of 2 positives, 1 of 2 negatives; worker 1: 2 of 4 positives, of mean 3; it has no negatives
    Steps(regtopk.Dryden(k=2), [([[4, 1, -1, -2], [1, 2, 1, 4]], [2, 1.5, 0, 0.5])]),
    Steps(
        regtopk.MIPDStyle(k=3, decay=0.5),
        [
            # worker 0 sends 4 and -2 of the wide layer and 3 of the narrow one, worker 1 one and two
            ([[4, -2, 1, 1, 3, -1], [1, 3, 1, 1, -20, 10]], [2, 0.5, 0, 0, -8.5, 5]),
            # left are (0, 0, 1, 1, 0, -1) and (1, 0, 1, 1, 0, 0), and next time half of it: 0.5 of means 0.25
            # and 0.25 in worker 0, of means 0.375 and 0 in worker 1, that is (2, 1) and (3, 0) entries
            ([[0] * 6, [0] * 6], [0.25, 0, 0.5, 0.5, 0, -0.25]),
        ],
        layout=WIDE_NARROW,
    ),
    Steps(
        regtopk.GradientDropping(density=0.25),
        [
            # the sample is all of 8 entries; a quarter of them reaches 7.     e = (0, 0, 6, 5, ...)
            ([[8, -7, 6, 5, 0.5, 0.3, -0.2, 0.1]], [8, -7, 0, 0, 0, 0, 0, 0]),
            # a = (1, 1, 6, 5, 0.5, ...): a quarter reaches 5
            ([[1, 1, 0, 0, 0, 0, 0, 0]], [0, 0, 6, 5, 0, 0, 0, 0]),
        ],
    ),
    Steps(
        regtopk.AdaComp(bin_conv=2, bin_other=3),
        [
            # e = 0, so H = 2 a
            # conv: bins of maximum 4 and 2, |H| = 8, 2 and 4, 3: entries 0, 2, 3, of value (4 + 2) / 2
            # linear: one bin of maximum 6, |H| = 2, 12, 6: entries 5, 6, of value -6
            ([[4, -1, 2, 1.5, 1, -6, -3]], [3, 0, 3, 3, 0, -6, -6]),
            # e = (1, -1, -1, -1.5, 1, 0, 3)
            # conv: a = 1.5, -1.5 and -0.5, -1.5, H = 2, -2 and 0, -1.5: entries 0, 1, 3, of value 1.5
            # linear: a = 1, 1, 3, H = 1, 2, 3: entry 6, of value 3
            # 1.5 and 3 are positive values of one block of the code: both travel as their mean, 2.25
            ([[0.5, -0.5, 0.5, 0, 0, 1, 0]], [2.25, -1.5, 0, -1.5, 0, 0, 2.25]),
        ],
        residual=[[-0.75, 0, -0.5, 0, 1, 1, 0.75]],
        layout=CONV_LINEAR,
    ),
    Steps(
        regtopk.GTopK(k=1),
        [
            # worker 0 sends entry 0 (5), worker 1 entry 1 (8); the sum is (2.5, 4, 0) and entry 1 is chosen:
            # the 5 goes back.                                  e_0 = (5, 3, 1), e_1 = (0, 0, 2)
            ([[5, 3, 1], [0, 8, 2]], [0, 4, 0]),
            # a_0 = (5, 3, 1), a_1 = (-5, 0, 4): both send entry 0, which cancels, and is still the one of
            # largest sum (all are zero, and of equal ones the first is taken): both have sent it
            ([[0, 0, 0], [-5, 0, 2]], [0, 0, 0]),
        ],
        residual=[[0, 3, 1], [0, 0, 4]],
    ),
    Steps(
        regtopk.EF21(k=1),
        [
            # h = 0: the largest changes are entry 0 (4) and entry 2 (6).    h_0 = (4, 0, 0), h_1 = (0, 0, 6)
            (OF_EF21, [2, 0, 3]),
            # the same gradients: changes (0, 2, 0) and (-2, 1, 0).          h_0 = (4, 2, 0), h_1 = (-2, 0, 6)
            (OF_EF21, [1, 1, 3]),
            # changes 0 and (0, 1, 0): now the aggregate is the mean gradient, and stays it
            (OF_EF21, [1, 1.5, 3]),
            (OF_EF21, [1, 1.5, 3]),
            # the first worker's entry 0 falls to 1: change -3
            ([[1, 2, 0], [-2, 1, 6]], [-0.5, 1.5, 3]),
        ],
    ),
    # v = (2, 1): entry 0. Then v = 0.75 (2, 1) + 0.25 (0, 4) = (1.5, 1.75): changes (-0.5, 1.75), entry 1
    Steps(regtopk.EF21(k=1, eta=0.25), [([[8, 4]], [2, 0]), ([[0, 4]], [2, 1.75])]),
    Steps(
        # Entries 0 and 2 are the first worker's to sum, 1 and 3 the second's. Each returns its largest sum.
        regtopk.EF21(density=0.25, returned=0.25),
        [
            (BOTH_WAYS, [0, 0, 3, 0]),  # of the sums 2 and 3, 3 comes back
            (BOTH_WAYS, [1, 1, 3, 0]),  # entry 0: the 2 that is owed and half of -2; entry 1: half of 2
            (BOTH_WAYS, [1, 1.5, 3, 0]),
            (BOTH_WAYS, [1, 1.5, 3, 0]),
        ],
    ),
]


@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_by_hand(case: Steps) -> None:
    case.check()


def test_an_oracle_that_is_refused_has_changed_nothing() -> None:
    algorithm = regtopk.GlobalTopK(k=1)
    worker = Worker(torch.tensor(0.5), torch.tensor(0), 2, 0, Layout.anonymous(3))
    state = algorithm.init(worker)
    conversation = algorithm.exchange(torch.tensor([6.0, 4.0, 1.0]), state, worker)
    assert isinstance(next(conversation), Peek)
    conversation.close()  # the driver of a real cluster cannot answer, and gives up
    assert state.residual.tolist() == [0.0, 0.0, 0.0]


def test_a_worker_of_weight_zero_does_not_lead_scalecom() -> None:
    cluster = Cluster(regtopk.ScaleCom(k=1), num_workers=3, weights=[0.0, 0.5, 0.5])
    grads = torch.tensor([[9.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]])
    assert [cluster.step(grads).argmax().item() for _ in range(3)] == [1, 2, 1]


def test_only_the_leader_of_scalecom_sends_indices() -> None:
    cluster = Cluster(regtopk.ScaleCom(k=40), num_workers=2)
    cluster.step(torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)))
    leader, other = cluster.last_step.payload_bytes.tolist()
    # a frame, 40 fields of floor(log2(1000 / 40)) = 4 bits in 5 words, 40 + (999 >> 4) = 102 unary bits in 4
    assert leader - other == 32 + 4 * 5 + 4 * 4
    assert other == 32 + 4 * 40  # one region, 40 values
    assert cluster.last_step.num_entries.tolist() == [40, 40]


def test_dryden_sends_at_least_one_of_either_sign_and_has_no_other_code() -> None:
    cluster = Cluster(regtopk.Dryden(density=0.02), num_workers=1)
    assert float(cluster.step(torch.cat([torch.ones(99), -torch.ones(1)])[None])[99]) == -1.0
    assert cluster.last_step.num_entries.tolist() == [3]
    with pytest.raises(TypeError, match="value_code"):
        regtopk.Dryden(k=1, value_code="float32")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("accumulated", "k", "budgets"),
    [
        ([4, -2, 1, 1, 3, -1], 3, [2, 1]),  # means 2 and 2: a density of 3/6 for both
        ([4, -2, 1, 1, 0.3, -0.1], 3, [3, 0]),  # means 2 and 0.2: c = 3 / 8.4, so 2.86 and 0.14 entries
        ([1, 1, 1, 1, 10, 10], 3, [1, 2]),  # 3 · 10 / 24 > 1: the narrow one sends all, 1 is left for 4
        ([0, 0, 0, 0, 5, 5], 3, [1, 2]),  # what is left goes to entries that are zero
        ([0, 0, 0, 0, 0, 0], 3, [2, 1]),
        ([7, 1, 0, 0, 0, 9], 6, [4, 2]),
    ],
)
def test_budgets_of_layers_follow_the_mean_magnitude(
    accumulated: list[float], k: int, budgets: list[int]
) -> None:
    assert layer_budgets(torch.tensor(accumulated), list(WIDE_NARROW.layers), k).tolist() == budgets


def test_gradient_dropping_sends_about_k_and_no_zeros() -> None:
    """3200 of 200,000 entries are sampled, and 32 of these reach the threshold: 18 % off is one sigma."""
    cluster = Cluster(regtopk.GradientDropping(density=0.01), num_workers=4)
    cluster.step(torch.randn(4, 200_000, generator=torch.Generator().manual_seed(0)))
    num_sent = cluster.last_step.num_entries
    assert len(set(num_sent.tolist())) > 1 and 2000 not in num_sent  # a sample, not exactly k
    assert bool(((num_sent > 1000) & (num_sent < 4000)).all())
    one = Cluster(regtopk.GradientDropping(density=0.1), num_workers=1)
    one.step(torch.eye(1000)[500:501])
    assert one.last_step.num_entries.tolist() == [1]


def test_larger_samples_estimate_better_and_all_entries_exactly() -> None:
    torch.manual_seed(2)
    cluster = Cluster(regtopk.GradientDropping(density=0.01, sample=0.1), num_workers=3)
    exact = Cluster(regtopk.GradientDropping(k=10, sample=1.0), num_workers=3)
    for _ in range(3):
        cluster.step(torch.randn(3, 200_000).half())
        num_sent = cluster.last_step.num_entries
        assert bool(((num_sent > 1600) & (num_sent < 2400)).all())  # of 200 in the sample 7 % is one sigma
        exact.step(torch.randn(3, 1000))
        assert exact.last_step.num_entries.tolist() == [10, 10, 10]


def test_bins_are_50_in_convolutions_and_500_elsewhere() -> None:
    layout = Layout.of_shapes([("conv", (100,), "conv"), ("linear", (100,), "linear")])
    grads = torch.full((1, 200), 0.1)
    grads[0, [0, 100]], grads[0, [50, 150]] = 10.0, 4.0
    cluster = Cluster(regtopk.AdaComp(), num_workers=1, layout=layout)
    aggregate = cluster.step(grads)
    assert aggregate.nonzero().flatten().tolist() == [0, 50, 100]  # 2 · 4 does not reach 10 in one bin


def test_what_a_code_loses_of_ef21_is_sent_later() -> None:
    cluster = Cluster(regtopk.EF21(k=2, value_code="2bit"), num_workers=1)
    grads = torch.tensor([[3.0, -1.0, 0.3, 0.1]])
    for _ in range(60):
        aggregate = cluster.step(grads)
    assert aggregate.tolist() == pytest.approx(grads[0].tolist(), abs=1e-5)
