"""Imputation: what it adds, who pays, and that nothing is lost or made."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk import DGC, ChunkedTopK, RegTopK, TopK
from regtopk.core import VALUE_CODES, Algorithm, OfSenders, SparseGradient, impute_, mean_of_senders
from regtopk.simulate import Cluster
from tests.algorithms.cases import WEIGHTS, J, N, assert_same, random_grads, residual_of, saved_tensors

IMPUTING: list[type[Any]] = [TopK, RegTopK, ChunkedTopK, DGC]
kinds = pytest.mark.parametrize("kind", IMPUTING, ids=lambda kind: kind.name)


@kinds
@pytest.mark.parametrize("code", VALUE_CODES)
def test_the_aggregate_and_the_residuals_as_the_formula_has_them(kind: type[Any], code: str) -> None:
    """The sum without imputation, entry by entry in float64, plus what the absent are taken to hold."""
    rho, weights = 0.35, torch.tensor(WEIGHTS).double()
    plain = Cluster(kind(k=20, value_code=code), num_workers=N, weights=WEIGHTS)
    imputed = Cluster(kind(k=20, value_code=code, impute=rho), num_workers=N, weights=WEIGHTS)
    (grads,) = random_grads(1)
    total, found = plain.step(grads).double(), imputed.step(grads).double()
    before = residual_of(plain).double()
    has_sent = sent_by(kind(k=20, value_code=code), grads)
    sent_weight = (weights[:, None] * has_sent).sum(0)
    mean = torch.where(sent_weight > 0, total / sent_weight, 0.0)
    torch.testing.assert_close(found, total + rho * (1 - sent_weight) * mean, rtol=1e-5, atol=1e-6)
    after = before - rho * mean * ~has_sent
    torch.testing.assert_close(residual_of(imputed).double(), after, rtol=1e-5, atol=1e-6)
    senders = has_sent.sum(0)
    assert bool(((senders > 0) & (senders < N)).any())
    assert torch.equal(residual_of(imputed)[has_sent], residual_of(plain)[has_sent])  # senders keep the bits


def sent_by(algorithm: Algorithm[Any], grads: Tensor) -> Tensor:
    """(N, J): who sends what, seen by giving each worker the whole weight in turn."""
    alone = [Cluster(algorithm, num_workers=N, weights=weights) for weights in torch.eye(N)]
    return torch.stack([cluster.step(grads) != 0 for cluster in alone])


@kinds
def test_nothing_changes_where_there_is_nothing_to_impute(kind: type[Any]) -> None:
    (grads,) = random_grads(1)
    same = grads[:1].expand(N, J)
    nothing_to_impute: list[tuple[Tensor, list[float], int]] = [
        (grads[:1], [1.0], 5),  # N = 1
        (grads, WEIGHTS, J),  # k = J
        (same, [0.25] * N, 20),  # all send the same (RegTop-k's score looks at the weight)
        (torch.zeros(N, J), WEIGHTS, 5),  # zeros
    ]
    for given, weight, k in nothing_to_impute:
        plain, imputed = (
            Cluster(kind(k=k, impute=rho), num_workers=len(weight), weights=weight) for rho in (0.0, 1.0)
        )
        for _ in range(3):
            assert torch.equal(plain.step(given), imputed.step(given))
        assert_same(saved_tensors(plain), saved_tensors(imputed))


def test_regtopk_remembers_the_imputed_aggregate() -> None:
    cluster = Cluster(RegTopK(k=1, impute=0.5), num_workers=2)
    aggregate = cluster.step(torch.tensor([[4.0, 1.0, 0.0], [1.0, 6.0, 0.0]]))
    assert aggregate.tolist() == [2.0 + 1.0, 3.0 + 1.5, 0.0]
    assert cluster.state is not None
    assert cluster.state.state_dict()["aggregate"].tolist() == [[3.0], [4.5]]


def test_means_may_be_named_twice() -> None:
    """An entry has its mean at both places, and is paid for once."""
    total, weight = torch.tensor([0.0, 3.0, 2.0]), torch.tensor([0.0, 0.5, 1.0])
    summed = OfSenders.of(total, weight, torch.tensor([1, 1]), torch.tensor([0.5, 0.5]))
    assert summed.mean.tolist() == [6.0, 6.0] and summed.missing.tolist() == [0.5, 0.5]
    assert mean_of_senders(summed).tolist() == [0.0, 6.0, 0.0]
    residual = torch.tensor([1.0, 2.0, 4.0])
    sent = SparseGradient(torch.tensor([2]), torch.tensor([2.0]), 3)
    assert impute_(residual, sent, summed, 0.5).tolist() == [0.0, 4.5, 2.0]
    assert residual.tolist() == [1.0, -1.0, 4.0]
