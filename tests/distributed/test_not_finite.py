"""A NaN or inf on one rank: all ranks skip the step, nothing is lost, and a GradScaler sees it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import regtopk
from regtopk.core.algorithm import Algorithm
from tests.distributed import training
from tests.distributed.conversations import RunningSum
from tests.distributed.ranks import on_ranks

ALGORITHM = regtopk.RegTopK(density=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("layer", ["last", "first"], ids=["first bucket", "last bucket"])
@on_ranks(2)
def test_a_skipped_step_changes_nothing(layer: str, value: float) -> None:
    """Training goes on as if the step had not been."""
    assert torch.equal(train(layer, value, bad_steps=()), train(layer, value, bad_steps=(0, 4, 5)))


def train(layer: str, value: float, bad_steps: tuple[int, ...]) -> Tensor:
    model = training.ddp(**training.SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with training.closing(regtopk.attach(model, ALGORITHM)) as exchange:
        for step in range(8):
            if step in bad_steps:
                before = training.algorithm_state(exchange)
                backward(model, step, spoiled=layer, value=value)
                assert training.same(training.algorithm_state(exchange), before)
                assert not training.flat_gradients(model).isfinite().any()  # on every rank
                assert exchange.last_step.num_skipped == 1
            optimizer.zero_grad()
            backward(model, step)
            assert training.flat_gradients(model).isfinite().all()
            assert exchange.last_step.num_skipped == 0
            optimizer.step()
        assert exchange.total.num_skipped == len(bad_steps) and exchange.num_steps == 8
        assert ("skipped" in exchange.summary()) == bool(bad_steps)
    return training.flat_parameters(model)


def backward(model: nn.Module, step: int, spoiled: str | None = None, value: float = 0.0) -> None:
    """A backward in which rank 1 alone may get one bad entry in the gradient of a layer."""
    with_spoiled_gradient(lambda: training.loss_of(model, step).backward(), model, spoiled, value)


def with_spoiled_gradient(act: Callable[[], Any], model: nn.Module, layer: str | None, value: float) -> None:
    hook = None
    if layer is not None and dist.get_rank() == 1:
        bias = dict(model.named_parameters())[f"module.{layer}.bias"]
        hook = bias.register_hook(lambda grad: spoil(grad, value))
    act()
    if hook is not None:
        hook.remove()


def spoil(grad: Tensor, value: float) -> Tensor:
    grad = grad.clone()
    grad[1] = value
    return grad


@on_ranks(2)
def test_exchange_without_ddp_skips_too() -> None:
    net = training.make_net()
    exchange = regtopk.Exchange(net, ALGORITHM)
    training.loss_of(net, 0).backward()
    exchange.step()
    before = training.algorithm_state(exchange)
    training.loss_of(net, 1).backward()
    if dist.get_rank() == 1:
        net.first.weight.grad[0, 0] = math.inf  # type: ignore[index]
    with training.listening() as said:
        exchange.step()
        assert training.same(training.algorithm_state(exchange), before)
        assert training.flat_gradients(net).isnan().all() and exchange.total.num_skipped == 1
        exchange.step()  # NaN still: said once
    assert said == [
        "after step 1 a rank's gradients were not finite, so all ranks get NaN: look at "
        "last_step.num_skipped before optimizer.step()"
    ]


# GradScaler: powers of two, so that scaled and unscaled runs can be compared bit for bit.


@pytest.mark.parametrize(
    "algorithm",
    [ALGORITHM, RunningSum(), regtopk.TopK(density=0.05, returned=0.02)],
    ids=["regtopk", "keeps what it returns", "sums come back in part"],
)
@on_ranks(2)
def test_loss_scales_do_not_mix_into_the_state(algorithm: Algorithm[Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    assert training.same(train_with(algorithm, scaler), train_with(algorithm, None))


def train_with(algorithm: Algorithm[Any], scaler: torch.amp.GradScaler | None) -> Any:
    model = training.ddp(**training.SMALL_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = set()
    with training.closing(regtopk.attach(model, algorithm, grad_scaler=scaler)) as exchange:
        for step in range(12):
            if scaler is None:
                optimizer.zero_grad()
                training.loss_of(model, step).backward()
                optimizer.step()
                continue
            if step in (2, 9):  # an overflow on one rank: the scaler must see it on both, and back off
                scale_before = scaler.get_scale()
                optimizer.zero_grad()
                loss = scaler.scale(training.loss_of(model, step))
                with_spoiled_gradient(loss.backward, model, "first", math.inf)
                scaler.step(optimizer)
                scaler.update()
                assert scaler.get_scale() == scale_before / 2
            optimizer.zero_grad()
            scaler.scale(training.loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.add(scaler.get_scale())
        assert scaler is None or len(scales) >= 3
        return training.flat_parameters(model), training.algorithm_state(exchange)
