"""A NaN in one part of one replica of a sharded model: all ranks of both axes skip the step alike."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import regtopk
from tests.distributed.late import answers_on_the_device
from tests.distributed.ranks import on_ranks
from tests.distributed.sharding import attached, grid, whole_gradients, whole_parameters
from tests.distributed.training import algorithm_state, loss_of, make_net, same

# A layer's rows are cut in two. Units arrive from the last to the first, whose gradients reach no other unit.
BAD = [("last", 2), ("first", 1), ("first", 39)]  # in the first unit; in part 0 and in part 1 of the last


class Interruption(Exception):  # noqa: N818
    """What a user's code raises in backward."""


@on_ranks(4)
def test_a_skipped_step_changes_nothing() -> None:
    found = [train(*BAD[-1], bad_steps=(0, 2))]
    with answers_on_the_device() as late:
        straight = train(bad_steps=())
        found += [train(*where, bad_steps=(0, 2)) for where in BAD]
    assert len(late) == 2 + 3 * 4  # all steps but the first of each run, and the bad ones beside
    for skipping in found:
        assert torch.equal(skipping, straight)  # training goes on as if the step had not been


def train(layer: str = "", row: int = 0, *, bad_steps: tuple[int, ...]) -> Tensor:
    model, exchange = attached(regtopk.RegTopK(density=0.05))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        if step in bad_steps:
            before = algorithm_state(exchange)
            backward(model, step, layer, row)
            assert same(algorithm_state(exchange), before)
            assert all(p.grad.to_local().isnan().all() for p in model.parameters())  # on every rank
            assert exchange.last_step.num_skipped == 1
        optimizer.zero_grad()
        loss_of(model, step).backward()
        assert whole_gradients(model).isfinite().all() and exchange.last_step.num_skipped == 0
        optimizer.step()
    assert exchange.total.num_skipped == len(bad_steps) and exchange.num_steps == 3
    return whole_parameters(model)


def backward(model: Any, step: int, layer: str, row: int) -> None:
    """A backward in which rank 1 alone has a bad gradient of one output of a layer."""

    def spoil(_: nn.Module, __: Any, output: Tensor) -> None:
        columns = torch.zeros(output.shape[-1])
        columns[row] = math.nan
        output.register_hook(lambda grad: grad + columns)

    hook = model.get_submodule(layer).register_forward_hook(spoil) if dist.get_rank() == 1 else None
    loss_of(model, step).backward()
    if hook is not None:
        hook.remove()


@on_ranks(4)
def test_a_backward_that_fails_is_taken_back() -> None:
    assert torch.equal(interrupted_at(None), interrupted_at(1))


def interrupted_at(bad_step: int | None) -> Tensor:
    """The gradients of the last of three steps, the parameters staying what they are."""
    net = make_net()
    fully_shard(net.last, mesh=grid(2, 2)["shard"])  # FSDP would keep half a gradient of the root's own layer
    model, exchange = attached(regtopk.TopK(density=0.05), net)
    for step in range(3):
        model.zero_grad()
        if step == bad_step:
            before = algorithm_state(exchange)
            hook = model.first.register_forward_hook(
                lambda *given: given[-1].register_hook(interrupt) and None
            )
            with pytest.raises(Interruption):
                loss_of(model, step).backward()
            hook.remove()
            model.reset_iter_state()  # of FSDP itself
            assert same(algorithm_state(exchange), before) and exchange.num_steps == step
        loss_of(model, step).backward()
    assert exchange.num_steps == 3
    return whole_gradients(model)


def interrupt(_: Tensor) -> None:
    raise Interruption


@on_ranks(4)
def test_a_grad_scaler_changes_nothing_but_the_steps_it_skips() -> None:
    scaled = train_by(torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2))
    assert torch.equal(train_by(None), scaled)  # scales are powers of two


def train_by(scaler: torch.amp.GradScaler | None) -> Tensor:
    model, exchange = attached(regtopk.TopK(density=0.05), grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        if scaler is not None and step == 3:  # an overflow on one rank
            scale = scaler.get_scale()
            scaler.scale(loss_of(model, step) * (math.inf if dist.get_rank() == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale / 2 and exchange.last_step.num_skipped == 1
            optimizer.zero_grad()
        if scaler is None:
            loss_of(model, step).backward()
            optimizer.step()
        else:
            scaler.scale(loss_of(model, step)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return whole_parameters(model)
