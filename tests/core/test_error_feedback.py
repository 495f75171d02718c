"""Coding inside error feedback: what a code loses is carried, and training converges all the same."""

import pytest
import torch

from regtopk.algorithms import Dense, TopK
from regtopk.core.algorithm import Algorithm
from regtopk.core.codes import VALUE_CODES, quantise
from regtopk.core.selection import take_at_, take_largest_
from regtopk.core.state import State
from regtopk.simulate import Cluster

LOSSY = VALUE_CODES[1:]


@pytest.mark.parametrize("code", VALUE_CODES)
def test_the_residual_keeps_what_the_code_lost(code: str) -> None:
    residual, grad = torch.randn(3, 500).double(), torch.randn(3, 500).double()
    accumulated = residual + grad
    sent = take_largest_(residual, grad, 40, code=code)
    values = accumulated.gather(-1, sent.indices)
    assert sent.code == code
    assert torch.equal(sent.values, quantise(values, code))
    assert torch.equal(residual.gather(-1, sent.indices), values - sent.values)
    assert torch.equal(accumulated.scatter(-1, sent.indices, 0.0), residual.scatter(-1, sent.indices, 0.0))
    if code == "float32":
        assert not bool(residual.gather(-1, sent.indices).any())


@pytest.mark.parametrize("code", VALUE_CODES)
def test_values_at_given_indices_are_coded_too(code: str) -> None:
    residual, grad = torch.randn(3, 50), torch.randn(3, 50)
    accumulated, indices = residual + grad, torch.tensor([3, 7, 40])
    sent = take_at_(residual, grad, indices, code=code)
    assert torch.equal(sent, quantise(accumulated[:, indices], code))
    assert torch.equal(residual[:, indices], accumulated[:, indices] - sent)


@pytest.mark.parametrize("code", LOSSY)
@pytest.mark.parametrize(
    "make", [lambda code: TopK(density=0.1, value_code=code), lambda c: Dense(value_code=c)]
)
def test_error_feedback_converges_to_the_optimum(code: str, make: object) -> None:
    """Least squares of 8 workers that agree on a heavy-tailed solution but see different curvatures.

    Without a code the relative distance after 200 steps is 6e-8, the last bits of float32.
    """
    assert callable(make)
    algorithm: Algorithm[State] = make(code)
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(2000, generator=generator).exp() * torch.randn(2000, generator=generator)
    curvature = torch.randn(8, 2000, generator=generator).exp()
    curvature /= curvature.mean(0)
    x, cluster = torch.zeros(2000), Cluster(algorithm, num_workers=8)
    for _ in range(200):
        x = x - 0.2 * cluster.step(curvature * (x - truth))
    assert float((x - truth).norm() / truth.norm()) < 1e-6
