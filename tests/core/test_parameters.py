"""The aggregate, recovered from the parameters that a server sends back."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regtopk.algorithms import RegTopK
from regtopk.core import Layout, SparseGradient, SparseSum, Worker, aggregate_from_parameters
from regtopk.errors import ArgumentError
from regtopk.simulate import Cluster

NUM_WORKERS, NUMEL, LR = 4, 30, 0.05


def test_the_sign_is_that_of_a_descent() -> None:
    before, after = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0])  # w - 0.5 (1, -2)
    assert aggregate_from_parameters(before, after, 0.5).tolist() == [1.0, -2.0]


def test_lists_of_parameters_come_back_flat_and_in_order() -> None:
    model = nn.Linear(3, 2)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.25).step()
    aggregate = aggregate_from_parameters(before, model.parameters(), 0.25)
    assert not aggregate.requires_grad
    torch.testing.assert_close(aggregate, torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 1.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lr", [1e-3, 0.1])
def test_the_error_is_that_of_the_rounded_parameters(dtype: torch.dtype, lr: float) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(100_000, generator=generator, dtype=dtype)
    grad = torch.randn(100_000, generator=generator, dtype=dtype) * torch.logspace(
        -9, 1, 100_000, dtype=dtype
    )
    parameter = nn.Parameter(before.clone())
    parameter.grad = grad.clone()
    torch.optim.SGD([parameter], lr=lr).step()
    found = aggregate_from_parameters(before, parameter, lr)
    eps, error = torch.finfo(dtype).eps, (found - grad).abs()
    assert bool((error <= eps * (parameter.detach().abs() / (2 * lr) + 2 * grad.abs())).all())
    assert float(error.max()) > eps / (8 * lr)  # and no smaller than its order: weights are about 1
    is_unmoved = parameter.detach() == before
    assert bool((found[is_unmoved] == 0).all())
    assert bool(is_unmoved.any()) == (dtype == torch.float32)  # 1e-9 lr is below float32's steps


class ParameterServer:
    """Adds up what workers send, takes a step of SGD, and sends the parameters back."""

    def __init__(self, weights: list[float]) -> None:
        self.weights = weights
        self.parameters = torch.zeros(NUMEL, dtype=torch.float64)

    def step(self, messages: list[SparseGradient]) -> Tensor:
        total = torch.zeros_like(self.parameters)
        for weight, message in zip(self.weights, messages, strict=True):
            total.index_add_(0, message.indices, weight * message.values)
        self.parameters = self.parameters - LR * total
        return self.parameters


@pytest.mark.parametrize("reference", ["previous", "current"])
def test_regtopk_selects_the_same_from_parameters_as_from_the_aggregate(reference: Any) -> None:
    weights = [0.4, 0.3, 0.2, 0.1]
    algorithm = RegTopK(k=6, mu=1.0, reference=reference)
    cluster = Cluster(algorithm, num_workers=NUM_WORKERS, weights=weights)
    server = ParameterServer(weights)
    layout = Layout.anonymous(NUMEL)
    workers = [
        Worker(torch.tensor(weight, dtype=torch.float64), torch.tensor(n), NUM_WORKERS, 0, layout)
        for n, weight in enumerate(weights)
    ]
    states = [algorithm.init(worker) for worker in workers]
    generator = torch.Generator().manual_seed(1)
    targets = 3 * torch.randn(NUM_WORKERS, NUMEL, generator=generator, dtype=torch.float64)
    model = torch.zeros(NUMEL, dtype=torch.float64)  # of the cluster, which gets the aggregate itself
    for _ in range(60):
        model = model - LR * cluster.step(model - targets)

        before = server.parameters
        asked = [
            algorithm.exchange(before - t, s, w) for t, s, w in zip(targets, states, workers, strict=True)
        ]
        requests = [next(conversation) for conversation in asked]
        after = server.step([request.sparse for request in requests if isinstance(request, SparseSum)])
        for conversation in asked:
            with pytest.raises(StopIteration):
                conversation.send(aggregate_from_parameters(before, after, LR))

        assert cluster.state is not None
        assert torch.equal(cluster.state.state_dict()["indices"], torch.stack([s.indices for s in states]))
    torch.testing.assert_close(server.parameters, model, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lr", [0.0, -0.1, math.inf, math.nan, "0.1"])
def test_a_learning_rate_must_be_positive(lr: Any) -> None:
    w = torch.ones(2)
    with pytest.raises(ArgumentError) as refused:
        aggregate_from_parameters(w, w.clone(), lr)
    assert str(refused.value) == f"lr must be positive and finite, got {lr!r}"


W = torch.ones(2)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (W, torch.ones(3), "after must have the shape, dtype and device of before, (2,) torch.float32 cpu, "
                           "got (3,) torch.float32 cpu"),
        ([W], [W.double()], "after must have the shape, dtype and device of before, (2,) torch.float32 cpu, "
                            "got (2,) torch.float64 cpu"),
        (W.long(), W.long(), "before must hold floating point tensors, got torch.int64"),
        (W, W, "before must be a copy made before the step, got the same memory as after"),
        ([W], W, "before and after must both be tensors or both lists, got one tensor: after"),
        (W, [W], "before and after must both be tensors or both lists, got one tensor: before"),
        ([W, W], [W.clone()], "before and after must hold the same parameters, at least one, "
                              "got 2 before and 1 after"),
        ([], [], "before and after must hold the same parameters, at least one, got 0 before and 0 after"),
    ],
)  # fmt: skip
def test_parameters_that_do_not_fit_are_refused(before: Any, after: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        aggregate_from_parameters(before, after, 0.1)
    assert str(refused.value) == message
