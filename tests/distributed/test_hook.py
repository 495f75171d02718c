"""The DDP hook: registered by hand, on models that do unusual things, and after the exchange is over."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk.errors import ClusterError
from tests.distributed import test_updates, training
from tests.distributed.ranks import on_ranks

ALGORITHM = regtopk.RegTopK(density=0.1)


def train(model: nn.Module, num_steps: int = 6) -> Tensor:
    test_updates.train(model, test_updates.sgd(model), range(num_steps))
    return training.flat_parameters(model)


@on_ranks(2)
def test_registered_by_hand_is_as_good_as_attach() -> None:
    results = []
    for by_hand in (True, False):
        model = training.ddp(**training.SMALL_BUCKETS)
        if by_hand:
            exchange: Any = regtopk.SparseHookState(model, ALGORITHM, index_code="rice")
            model.register_comm_hook(exchange, regtopk.sparse_hook)
        else:
            exchange = regtopk.attach(model, ALGORITHM, index_code="rice")
        with training.closing(exchange):
            results.append((train(model), training.algorithm_state(exchange), exchange.total.sent_bytes))
    assert training.same(*results)


@on_ranks(2)
def test_parameters_that_ddp_ignores_are_left_alone() -> None:
    net = training.make_net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["extra.weight", "last.bias"])
    model = DistributedDataParallel(net)
    with training.closing(regtopk.attach(model, regtopk.TopK(density=1.0))) as exchange:
        alone = training.make_net()
        training.loss_of(alone, 0).backward()
        training.loss_of(model, 0).backward()
        assert {"extra.weight", "last.bias"}.isdisjoint(exchange._steps.parameters.named)
        for name in ("extra.weight", "last.bias"):  # this rank's own gradient
            own = dict(alone.named_parameters())[name].grad
            assert training.same(dict(net.named_parameters())[name].grad, own)


@on_ranks(2)
def test_frozen_for_a_while_in_between() -> None:
    """As a GAN does: the discriminator is frozen while the generator learns through it."""
    model = training.ddp(**training.SMALL_BUCKETS)
    with training.closing(regtopk.attach(model, ALGORITHM)) as exchange:
        for step in range(3):
            model.zero_grad()
            training.loss_of(model, step).backward()
            model.requires_grad_(False)
            x = training.batch(step).requires_grad_()
            model(x).sum().backward()
            assert x.grad is not None
            model.requires_grad_(True)
        assert exchange.num_steps == 3


@on_ranks(2)
def test_a_backward_that_fails_changes_nothing() -> None:
    results = []
    for fails in (True, False):
        model = training.ddp(**training.SMALL_BUCKETS)
        with training.closing(regtopk.attach(model, ALGORITHM)) as exchange:
            train(model, 3)
            if fails:
                before = training.algorithm_state(exchange), exchange.total.residual_norm
                hook = model.module.first.bias.register_hook(raise_an_error)
                with pytest.raises(ZeroDivisionError):
                    training.loss_of(model, 7).backward()
                hook.remove()  # some buckets have arrived: what is saved is the state before the step
                assert training.same(
                    (training.algorithm_state(exchange), exchange.total.residual_norm), before
                )
                model = rewrapped(model, exchange)
            results.append(train(model, 3))
    assert torch.equal(*results)


@on_ranks(2)
def test_compiled_models_train_as_others_do() -> None:
    """torch.compile inside DDP's hands: not at all, before attach, and after it."""
    results = []
    for when in ("never", "before", "after"):
        model = training.ddp()
        compiled: Any = torch.compile(model, backend="eager") if when == "before" else model
        with training.closing(regtopk.attach(compiled, ALGORITHM)) as exchange:
            if when == "after":
                compiled = torch.compile(model, backend="eager")
            results.append((train(compiled, 4), training.algorithm_state(exchange)))
        if when == "before":
            with pytest.raises(ClusterError, match=r"^attach must be called once"):
                regtopk.attach(model, ALGORITHM)
    assert training.same(results[1], results[0]) and training.same(results[2], results[0])


def raise_an_error(grad: Tensor) -> Tensor:
    raise ZeroDivisionError("out of luck")


def rewrapped(model: DistributedDataParallel, exchange: Any) -> DistributedDataParallel:
    """A failed backward leaves DDP unusable: wrap the net anew and go on with the same exchange."""
    new = DistributedDataParallel(model.module, **training.SMALL_BUCKETS)
    new.register_comm_hook(exchange, regtopk.sparse_hook)
    return new


@on_ranks(2)
def test_closed_exchanges_refuse_to_go_on() -> None:
    model = training.ddp()
    exchange = regtopk.attach(model, ALGORITHM)
    training.loss_of(model, 0).backward()
    exchange.close()
    for act in (
        exchange.state_dict,
        lambda: exchange.load_state_dict({}),
        training.loss_of(model, 1).backward,
    ):
        assert training.refusal(act) == ("ClusterError", "the exchange must not be used after close()")


@on_ranks(2)
def test_errors_of_an_algorithm_keep_their_kind() -> None:
    model = training.ddp()
    with training.closing(regtopk.attach(model, regtopk.TopK(density=lambda step: 0.5 + step))):
        training.loss_of(model, 0).backward()
        refused = training.refusal(lambda: training.loss_of(model, 1).backward())
    assert refused == ("ArgumentError", "density must be in (0, 1], got 1.5")
