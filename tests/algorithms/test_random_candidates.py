from typing import Any

import torch

from regtopk.algorithms import RandomCandidates, RandomK, TopK
from regtopk.core.codes import quantise
from regtopk.core.random import random_subset
from regtopk.simulate import Cluster
from tests.algorithms.cases import random_grads, residual_of


def test_the_compressor_of_cocktail_sgd_by_hand() -> None:
    """10 % of 1,000 entries are candidates, the largest 20 of these 100 are sent, in 4 bits each.

    What was not sent, and what the code lost of it, is carried.
    """
    numel, num_workers = 1000, 3
    cluster = Cluster(
        RandomCandidates(density=0.02, factor=5, value_code="4bit", seed=6), num_workers=num_workers
    )
    residual = torch.zeros(num_workers, numel)
    for step, grads in enumerate(random_grads(10, num_workers, numel)):
        accumulated = residual + grads
        candidates = random_subset(numel, 100, 6, step)
        sent = torch.zeros(num_workers, numel)
        for n in range(num_workers):
            best = candidates[accumulated[n, candidates].abs().topk(20).indices].sort().values
            sent[n, best] = quantise(accumulated[n, best], "4bit")
        residual = accumulated - sent
        torch.testing.assert_close(cluster.step(grads), sent.mean(0))
        torch.testing.assert_close(residual_of(cluster), residual)
    # a frame; 20 values of 4 bits and 2 scales; 20 fields of 2 bits; 20 + (99 >> 2) unary bits
    assert cluster.last_step.payload_bytes.tolist() == [32 + 4 * (3 + 2) + 4 * 2 + 4 * 2] * num_workers


def test_one_candidate_an_entry_is_randomk_and_enough_of_them_is_topk() -> None:
    pairs: list[tuple[Any, Any]] = [
        (RandomCandidates(k=7, factor=1, seed=2), RandomK(k=7, seed=2)),
        (RandomCandidates(k=7, factor=100), TopK(k=7)),
    ]
    for candidates, known in pairs:
        one, other = (Cluster(x, num_workers=4) for x in (candidates, known))
        for grads in random_grads(10):
            assert torch.equal(one.step(grads), other.step(grads))
