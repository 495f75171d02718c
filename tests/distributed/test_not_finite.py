"""A NaN or inf on one rank: all ranks skip the step, nothing is lost, and a GradScaler sees it.

Of sharded models it is in one part of one replica, and all ranks of both axes skip the step alike.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import regtopk
from regtopk.core.algorithm import Algorithm
from tests.distributed import training
from tests.distributed.conversations import RunningSum
from tests.distributed.ranks import on_ranks
from tests.distributed.sharding import attached, grid, whole_parameters
from tests.distributed.test_updates import sgd

ALGORITHM = regtopk.RegTopK(density=0.05)
# A layer's rows are cut in two. Units arrive from the last to the first, whose gradients reach no other unit.
BAD = [("last", 2), ("first", 1), ("first", 39)]  # in the first unit; in part 0 and in part 1 of the last


def train(
    model: nn.Module, exchange: Any, bad_backward: Callable[[int], None], bad_steps: tuple[int, ...]
) -> None:
    """Six steps, some of which are made a second time: in the first, one rank's gradients are bad."""
    optimizer = sgd(model)
    for step in range(6):
        if step in bad_steps:
            before = training.algorithm_state(exchange)
            bad_backward(step)
            assert training.same(training.algorithm_state(exchange), before)
            own: list[Any] = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
            assert all(grad.isnan().all() for grad in own)  # on every rank
            assert exchange.last_step.num_skipped == 1
        optimizer.zero_grad()
        training.loss_of(model, step).backward()
        assert training.flat_gradients(model).isfinite().all() and exchange.last_step.num_skipped == 0
        optimizer.step()
    assert exchange.total.num_skipped == len(bad_steps) and exchange.num_steps == 6
    assert ("skipped" in exchange.summary()) == bool(bad_steps)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("layer", ["last", "first"], ids=["first bucket", "last bucket"])
@on_ranks(2)
def test_a_skipped_step_changes_nothing(layer: str, value: float) -> None:
    """Training goes on as if the step had not been."""
    found = []
    for bad_steps in ((), (0, 4, 5)):
        model = training.ddp(**training.SMALL_BUCKETS)
        with training.closing(regtopk.attach(model, ALGORITHM)) as exchange:
            train(model, exchange, partial(backward, model, layer, value), bad_steps)
        found.append(training.flat_parameters(model))
    assert torch.equal(*found)


def backward(model: nn.Module, layer: str, value: float, step: int) -> None:
    with_spoiled_gradient(training.loss_of(model, step).backward, model, layer, value)


def with_spoiled_gradient(act: Callable[[], Any], model: nn.Module, layer: str, value: float) -> None:
    """On rank 1 alone one entry in the gradient of a layer is bad."""

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[1] = value
        return grad

    bias = model.get_parameter(f"module.{layer}.bias")
    hook = bias.register_hook(spoil) if dist.get_rank() == 1 else None
    act()
    if hook is not None:
        hook.remove()


@on_ranks(4)
def test_a_skipped_step_of_a_sharded_model_changes_nothing() -> None:
    found = [train_sharded(*BAD[-1], bad_steps=(0, 2))]
    with training.answers_on_the_device() as late:
        straight = train_sharded(bad_steps=())
        found += [train_sharded(*where, bad_steps=(0, 2)) for where in BAD]
    assert late.call_count == 5 + 3 * 7  # all steps but the first of each run, and the bad ones beside
    for skipping in found:
        assert torch.equal(skipping, straight)


def train_sharded(layer: str = "", row: int = 0, *, bad_steps: tuple[int, ...]) -> Tensor:
    model, exchange = attached(ALGORITHM)
    train(model, exchange, partial(backward_sharded, model, layer, row), bad_steps)
    return whole_parameters(model)


def backward_sharded(model: Any, layer: str, row: int, step: int) -> None:
    """A backward in which rank 1 alone has a bad gradient of one output of a layer."""

    def spoil(_: nn.Module, __: Any, output: Tensor) -> None:
        columns = torch.zeros(output.shape[-1])
        columns[row] = math.nan
        output.register_hook(lambda grad: grad + columns)

    hook = model.get_submodule(layer).register_forward_hook(spoil) if dist.get_rank() == 1 else None
    training.loss_of(model, step).backward()
    if hook is not None:
        hook.remove()


@on_ranks(4)
def test_a_backward_that_fails_is_taken_back() -> None:
    assert torch.equal(interrupted_at(None), interrupted_at(1))


def interrupted_at(bad_step: int | None) -> Tensor:
    """The gradients of the last of three steps, the parameters staying what they are."""
    net = training.make_net()
    fully_shard(net.last, mesh=grid(2, 2)["shard"])  # FSDP would keep half a gradient of the root's own layer
    model, exchange = attached(regtopk.TopK(density=0.05), net)
    for step in range(3):
        model.zero_grad()
        if step == bad_step:
            before = training.algorithm_state(exchange)
            hook = model.first.register_forward_hook(
                lambda *given: given[-1].register_hook(lambda grad: 1 / 0) and None
            )
            with pytest.raises(ZeroDivisionError):
                training.loss_of(model, step).backward()
            hook.remove()
            model.reset_iter_state()  # of FSDP itself
            assert training.same(training.algorithm_state(exchange), before) and exchange.num_steps == step
        training.loss_of(model, step).backward()
    assert exchange.num_steps == 3
    return training.flat_gradients(model)


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


def train_with(
    scaler: torch.amp.GradScaler | None, model: nn.Module, exchange: Any, overflow: Callable[[Tensor], None]
) -> None:
    """Twelve steps. With a scaler two are made again after an overflow on one rank, which all must see."""
    optimizer, scales = sgd(model), set()
    for step in range(12):
        optimizer.zero_grad()
        if scaler is None:
            training.loss_of(model, step).backward()
            optimizer.step()
            continue
        if step in (2, 9):
            scale_before = scaler.get_scale()
            overflow(scaler.scale(training.loss_of(model, step)))
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale_before / 2 and exchange.last_step.num_skipped == 1
            optimizer.zero_grad()
        scaler.scale(training.loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.add(scaler.get_scale())
    assert scaler is None or len(scales) >= 3


def scaler_or_none() -> tuple[torch.amp.GradScaler, None]:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3), None


@pytest.mark.parametrize(
    "algorithm",
    [ALGORITHM, RunningSum(), regtopk.TopK(density=0.05, returned=0.02)],
    ids=["regtopk", "keeps what it returns", "sums come back in part"],
)
@on_ranks(2)
def test_loss_scales_do_not_mix_into_the_state(algorithm: Algorithm[Any]) -> None:
    found = []
    for scaler in scaler_or_none():
        model = training.ddp(**training.SMALL_BUCKETS)
        with training.closing(regtopk.attach(model, algorithm, grad_scaler=scaler)) as exchange:
            spoil = partial(with_spoiled_gradient, model=model, layer="first", value=math.inf)
            train_with(scaler, model, exchange, lambda loss: spoil(loss.backward))  # noqa: B023
            found.append((training.flat_parameters(model), training.algorithm_state(exchange)))
    assert training.same(*found)


@on_ranks(4)
def test_a_scaler_of_a_sharded_model_changes_nothing_but_the_steps_it_skips() -> None:
    found = []
    for scaler in scaler_or_none():
        model, exchange = attached(regtopk.TopK(density=0.05), grad_scaler=scaler)
        bad = math.inf if dist.get_rank() == 1 else 1.0
        train_with(scaler, model, exchange, lambda loss: (loss * bad).backward())  # noqa: B023
        found.append(whole_parameters(model))
    assert torch.equal(*found)
