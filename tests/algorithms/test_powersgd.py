"""PowerSGD on matrices of known rank, and count sketches by their definition: what they send and find."""

import math

import torch

from regtopk.algorithms import PowerSGD, Sketch, TopK
from regtopk.core.random import uniform
from regtopk.core.requests import DenseSum
from regtopk.core.worker import Layout
from regtopk.simulate import Cluster
from tests.algorithms.cases import normal
from tests.algorithms.lockstep import LockStep

OF_RANKS = Layout.of_shapes(
    [("matrix", (8, 12), "linear"), ("bias", (3,), "bias"), ("thin", (2, 9), "linear")]
)


def test_a_sum_of_the_factors_rank_arrives_whole() -> None:
    """Each worker's matrix has full rank, and their mean is of rank 2."""
    grads, low = normal(2, OF_RANKS.numel), (normal(8, 2) @ normal(2, 12, seed=1)).flatten()
    grads[1, :96] = 2 * low - grads[0, :96]
    aggregate = Cluster(PowerSGD(rank=2), num_workers=2, layout=OF_RANKS).step(grads)
    torch.testing.assert_close(aggregate, grads.mean(0), rtol=1e-4, atol=1e-4)


def test_factors_and_what_is_too_small_for_them_are_sent() -> None:
    """Rank 1: 8 and 12 numbers for the matrix; 3 of the vector, and 18 of a matrix of 2 (2 + 9) > 18.

    Each of two sums has two regions, with a frame of 16 bytes.
    """
    cluster = Cluster(PowerSGD(rank=1), num_workers=2, layout=OF_RANKS)
    cluster.step(normal(2, OF_RANKS.numel))
    assert cluster.last_step.payload_bytes.tolist() == [4 * (8 + 12 + 3 + 18) + 4 * 16] * 2


def test_later_steps_send_what_earlier_ones_left() -> None:
    grads = normal(3, OF_RANKS.numel)
    cluster = Cluster(PowerSGD(rank=1), num_workers=3, layout=OF_RANKS)
    aggregates = torch.stack([cluster.step(grads) for _ in range(400)])
    error = (aggregates - grads.mean(0)).norm(dim=-1) / grads.mean(0).norm()
    assert error[0] > 0.4
    assert (aggregates.mean(0) - grads.mean(0)).norm() / grads.mean(0).norm() < 0.05


CANCELLING = torch.tensor([[10.0, 1, 0, 0, 0, 0, 0, 0], [-10.0, 0, 0, 0, 0, 1, 0, 0]])


def test_it_finds_what_is_large_in_the_sum() -> None:
    """Entry 0 cancels: of the sum, (0, 1/2, 0, 0, 0, 1/2, 0, 0), Top-1 never sees anything."""
    sketched = Cluster(Sketch(k=2, columns=64), num_workers=2)
    assert sketched.step(CANCELLING).tolist() == [0, 0.5, 0, 0, 0, 0.5, 0, 0]
    assert not bool(Cluster(TopK(k=1), num_workers=2).step(CANCELLING).any())


def test_cells_are_signed_sums_of_their_entries() -> None:
    rows, columns, numel = 3, 3, 8
    ranks = LockStep(
        Sketch(k=1, rows=rows, columns=columns, seed=9), [0.5, 0.5], Layout.anonymous(numel), torch.float32
    )
    for step in range(3):
        accumulated = [state.residual + grad for state, grad in zip(ranks.states, CANCELLING, strict=True)]  # type: ignore[attr-defined]
        _, rounds = ranks.step(CANCELLING)
        for rank, asked in enumerate(rounds[0]):
            expected = torch.zeros(rows, columns)
            for row in range(rows):
                turns = uniform(torch.tensor(row), 9, step, math.ceil(numel / columns)).tolist()
                bits = uniform(torch.tensor(rows), 9, step, numel).tolist()
                for entry in range(numel):
                    cell = (entry + int(columns * turns[entry // columns])) % columns
                    is_negative = int(2**rows * bits[entry]) >> row & 1
                    expected[row, cell] += accumulated[rank][entry] * (-1) ** is_negative
            assert isinstance(asked, DenseSum)
            torch.testing.assert_close(asked.tensor.view(rows, columns), expected)


def test_the_estimate_is_the_median_over_rows() -> None:
    """With one row an entry of 5 is as large in every cell-mate; with five rows hardly any is."""
    grads = torch.zeros(1, 1000)
    grads[0, 17] = 5.0
    many = Cluster(Sketch(k=1, rows=5, columns=8), num_workers=1)
    assert many.step(grads).nonzero().flatten().tolist() == [17]
    ranks = LockStep(Sketch(k=200, rows=1, columns=8), [1.0], Layout.anonymous(1000), torch.float32)
    _, rounds = ranks.step(grads)
    (asked,) = rounds[0]
    assert isinstance(asked, DenseSum) and asked.tensor.abs().sort().values.tolist() == [0.0] * 7 + [5.0]


def test_columns_are_four_times_k_unless_given() -> None:
    cluster = Cluster(Sketch(k=10, rows=3), num_workers=1)
    cluster.step(torch.ones(1, 500))
    assert cluster.last_step.num_entries.tolist() == [3 * 40 + 10]
