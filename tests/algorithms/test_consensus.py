"""Consensus: hand-worked steps, the support, coded sums, and what a shared support is worth to RegTop-k."""

import torch

from regtopk.algorithms import Consensus
from regtopk.algorithms.posterior import PosteriorScore
from regtopk.core.random import random_sequence
from regtopk.simulate import Cluster
from tests.algorithms.cases import residual_of


def test_consensus_by_hand() -> None:
    cluster = Cluster(Consensus(k=2), num_workers=2)
    # each proposes one: worker 0 entry 0 (6), worker 1 entry 3 (5); both send both.
    grads = torch.tensor([[6.0, 4.0, 1.0, 1.0], [-4.0, 1.0, 2.0, 5.0]])
    assert cluster.step(grads).tolist() == [(6 - 4) / 2, 0.0, 0.0, (1 + 5) / 2]
    # e_0 = (0, 4, 1, 0), e_1 = (0, 1, 2, 0): entries 1 and 2
    assert cluster.step(torch.zeros(2, 4)).tolist() == [0.0, (4 + 1) / 2, (1 + 2) / 2, 0.0]
    assert not bool(residual_of(cluster).any())


def test_a_support_of_equal_proposals_is_filled_at_random() -> None:
    seed, numel, grads = 3, 50, torch.ones(2, 50)
    grads[:, 7] = 9.0
    filled = set()
    cluster = Cluster(Consensus(k=2, seed=seed), num_workers=2)
    for step in range(3):  # entry 7 is proposed by both, every time
        aggregate = cluster.step(grads)
        drawn = [int(entry) for entry in random_sequence(numel, 2, seed, step) if entry != 7]
        assert aggregate.nonzero().flatten().tolist() == sorted([7, drawn[0]])
        filled.add(drawn[0])
    assert len(filled) == 3


def test_fewer_entries_than_workers_are_taken_in_turn() -> None:
    cluster = Cluster(Consensus(k=1), num_workers=3, weights=[0.5, 0.0, 0.5])  # worker 1 never has a say
    grads = torch.tensor([[4.0, 1.0, 0.0], [0.0, 9.0, 0.0], [0.0, 1.0, 6.0]])
    assert [cluster.step(grads).tolist() for _ in range(3)] == [
        [4.0 / 2, 0.0, 0.0],
        [0.0, 0.0, 2 * 6.0 / 2],
        [2 * 4.0 / 2, 0.0, 0.0],
    ]


def test_indices_are_paid_once() -> None:
    """J = 2^20, k = 4096, N = 8: a worker names 512 entries and sends 4096 values of 4 bits."""
    cluster = Cluster(Consensus(k=4096, value_code="4bit"), num_workers=8)
    cluster.step(torch.randn(8, 2**20, generator=torch.Generator().manual_seed(0)))
    # names: a frame, 512 fields of 11 bits, 512 + (2^20 - 1 >> 11) = 1023 unary bits in 32 words
    names = 32 + 4 * (512 * 11 // 32) + 4 * 32
    # values, to the 8 owners of 512 each: a frame, 4 blocks of 2 scales, 512 · 4 bits
    values = 8 * (32 + 4 * 2 * 4 + 512 // 2)
    assert cluster.last_step.payload_bytes.tolist() == [names + values] * 8
    assert cluster.last_step.num_entries.tolist() == [4096] * 8


def test_on_a_shared_support_the_score_knows_the_others_sum() -> None:
    grads = [
        torch.tensor([[5.0, 1.0, 0.0, 0.0], [-5.0, 0.0, 1.0, 6.0]]),
        torch.tensor([[5.0, 1.0, 0.0, 4.0], [-5.0, 0.0, 1.0, 4.0]]),
    ]
    plain = Cluster(Consensus(k=2, seed=3), num_workers=2)
    scored = Cluster(Consensus(k=2, seed=3, score=PosteriorScore(mu=1.0)), num_workers=2)
    for cluster in (plain, scored):  # entries 0 and 3 are proposed, and entry 0 cancels: 5/2 - 5/2
        assert cluster.step(grads[0]).tolist() == [0.0, 0.0, 0.0, 3.0]
    # a_0 = (5, 2, 0, 4), a_1 = (-5, 0, 2, 4). By magnitude both propose entry 0 again, which cancels again;
    # of the random entries of seed 3, 1 comes first.
    assert plain.step(grads[1]).tolist() == [0.0, (2 + 0) / 2, 0.0, 0.0]
    # Entry 0 has 1 + D = 0 for both. Entry 3: worker 1 sent 6, 1 + D = 3 / 3, score 4 tanh(1) = 3.05 > 2;
    # worker 0 sent a zero, which counts as not sent, score 4. Both propose entry 3.
    assert scored.step(grads[1]).tolist() == [0.0, (2 + 0) / 2, 0.0, (4 + 4) / 2]
