"""Top-k within chunks, and among random candidates."""

from typing import Any

import pytest
import torch

from regtopk.algorithms import ChunkedTopK, RandomCandidates, RandomK, TopK
from regtopk.algorithms.posterior import PosteriorScore
from regtopk.core.codes import quantise
from regtopk.core.random import random_subset
from regtopk.simulate import Cluster
from tests.algorithms.cases import random_grads, residual_of


def test_chunks_and_decay_by_hand() -> None:
    cluster = Cluster(ChunkedTopK(density=0.5, chunk=2, decay=0.5), num_workers=1)
    # one of each of (5, 4), (1, -2) and (3): the last chunk is short
    assert cluster.step(torch.tensor([[5.0, 4.0, 1.0, -2.0, 3.0]])).tolist() == [5.0, 0.0, 0.0, -2.0, 3.0]
    # the residual (0, 4, 1, 0, 0) is halved: a = (1, 2, 0.5, 1, 0)
    assert cluster.step(torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0]])).tolist() == [0.0, 2.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("numel", "options", "num_sent"),
    [
        (8_192, {"density": 1 / 64}, 64 + 64),  # of 4096 each
        (10_000, {"density": 1 / 64}, 52 + 52 + 52),  # of 3334, 3334 and 3332
        (5, {"density": 1.0, "chunk": 4}, 3 + 2),
        (100, {"density": 1 / 64}, 2),  # one chunk of 100: round(100 / 64)
        (1_000, {"density": 0.0001, "chunk": 100}, 10),  # at least one a chunk
        (1_000, {"k": 50, "chunk": 100}, 50),
    ],
)
def test_how_many_are_sent(numel: int, options: dict[str, Any], num_sent: int) -> None:
    cluster = Cluster(ChunkedTopK(**options), num_workers=2)
    cluster.step(torch.randn(2, numel, generator=torch.Generator().manual_seed(0)))
    assert cluster.last_step.num_entries.tolist() == [num_sent, num_sent]


def test_one_chunk_of_everything_is_topk() -> None:
    chunked, topk = (Cluster(x, num_workers=4) for x in (ChunkedTopK(k=7), TopK(k=7)))
    for grads in random_grads(20):
        assert torch.equal(chunked.step(grads), topk.step(grads))


def test_regtopk_score_acts_within_a_chunk() -> None:
    algorithm = ChunkedTopK(density=0.5, chunk=2, score=PosteriorScore(mu=1.0))
    cluster = Cluster(algorithm, num_workers=2)
    grads = torch.tensor([[4.0, 1.0, 2.0, 0.5], [-4.0, 1.0, 2.0, 0.5]])
    assert cluster.step(grads).tolist() == [0.0, 0.0, 2.0, 0.0]  # entry 0 cancels, entry 2 does not
    # a = (±4, 2, 2, 1): entry 0 has factor 0, so 1 is sent. Entry 2: 1 + D = 2, 2 tanh(2) = 1.93 > 1
    assert cluster.step(grads).tolist() == [0.0, 2.0, 2.0, 0.0]


def test_the_compressor_of_cocktail_sgd_by_hand() -> None:
    """10 % of 1,000 entries are candidates, the largest 20 of these 100 are sent, in 4 bits each.

    What was not sent, and what the code lost of it, is carried.
    """
    numel, num_workers = 1000, 3
    algorithm = RandomCandidates(density=0.02, factor=5, value_code="4bit", seed=6)
    cluster = Cluster(algorithm, num_workers=num_workers)
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
