"""Count sketches by their definition, and what they find that Top-k does not."""

import math

import torch

from regtopk.algorithms import Sketch, TopK
from regtopk.core.random import uniform
from regtopk.core.requests import DenseSum
from regtopk.core.worker import Layout
from regtopk.simulate import Cluster
from tests.algorithms.lockstep import LockStep

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
