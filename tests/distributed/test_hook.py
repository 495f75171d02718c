"""The DDP hook: by hand, on models that do unusual things or leave parts out, detached, and after its end."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk.errors import ClusterError
from tests.distributed import test_updates, training
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.test_counts import by_hook

ALGORITHM = regtopk.RegTopK(density=0.1)


def train(model: nn.Module, num_steps: int = 6) -> Tensor:
    test_updates.train(model, test_updates.sgd(model), range(num_steps))
    return training.flat_parameters(model)


@on_ranks(2)
def test_registered_by_hand_is_as_good_as_attach() -> None:
    results = []
    for way in (by_hook, regtopk.attach):
        model = training.ddp(**training.SMALL_BUCKETS)
        with training.closing(way(model, ALGORITHM, index_code="rice")) as exchange:
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
                hook = model.module.first.bias.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    training.loss_of(model, 7).backward()
                hook.remove()  # some buckets have arrived: what is saved is the state before the step
                after = training.algorithm_state(exchange), exchange.total.residual_norm
                assert training.same(after, before)
                # it leaves DDP unusable: the net is wrapped anew and goes on with the same exchange
                model = DistributedDataParallel(model.module, **training.SMALL_BUCKETS)
                model.register_comm_hook(exchange, regtopk.sparse_hook)
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


@on_ranks(2)
def test_closed_exchanges_refuse_to_go_on() -> None:
    model = training.ddp()
    exchange = regtopk.attach(model, ALGORITHM)
    training.loss_of(model, 0).backward()
    exchange.close()
    backward = training.loss_of(model, 1).backward
    for act in (exchange.state_dict, lambda: exchange.load_state_dict({}), backward):
        assert training.refusal(act) == ("ClusterError", "the exchange must not be used after close()")


@on_ranks(2)
def test_errors_of_an_algorithm_keep_their_kind() -> None:
    model = training.ddp()
    with training.closing(regtopk.attach(model, regtopk.TopK(density=lambda step: 0.5 + step))):
        training.loss_of(model, 0).backward()
        refused = training.refusal(lambda: training.loss_of(model, 1).backward())
    assert refused == ("ArgumentError", "density must be in (0, 1], got 1.5")


@on_ranks(4)
def test_a_detached_model_trains_as_plain_ddp_does() -> None:
    """On three ranks: a third is no float. Three sparse steps; from there on, both side by side."""
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() == 3:
        return
    model, plain = (training.ddp(**training.SMALL_BUCKETS, process_group=group) for _ in range(2))
    exchange = regtopk.attach(model, regtopk.RegTopK(density=0.1))
    for trained in (model, plain):  # both: DDP makes its buckets in the second backward
        test_updates.train(trained, test_updates.sgd(trained), range(3))
    sent_bytes = exchange.total.sent_bytes
    exchange.detach()
    plain.module.load_state_dict(model.module.state_dict())
    for trained in (model, plain):
        test_updates.train(trained, test_updates.sgd(trained), range(3, 6))
    assert exchange.num_steps == 3 and exchange.total.sent_bytes == sent_bytes
    assert exchange.total.residual_norm == 0  # what was not sent is dropped
    assert exchange.summary().endswith(
        "\n  detached  the residual was dropped; the dense steps since are not counted here"
    )
    refused = "ClusterError", "the exchange must not be used after detach()"
    assert training.refusal(exchange.state_dict) == refused
    assert torch.equal(training.flat_parameters(model), training.flat_parameters(plain))


NUM_STEPS = 15
WEIGHTS = [0.7, 0.3]


@pytest.mark.parametrize("is_view", [False, True], ids=["copies", "views of buckets"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_applied_plus_residual_is_the_sum_of_gradients(
    two_ranks: Ranks, set_to_none: bool, is_view: bool
) -> None:
    found = two_ranks.run(train_without_some, set_to_none, is_view)
    applied, num_given = found[0][0], found[0][2]
    assert torch.equal(applied, found[1][0])
    assert num_given > 0  # entries did come for the unused layer: the case is not empty
    kept = sum(weight * residual for weight, (_, residual, _, _) in zip(WEIGHTS, found, strict=True))
    due = sum(weight * grads for weight, (_, _, _, grads) in zip(WEIGHTS, found, strict=True))
    # float32 sums of 15 steps of numbers below 1: a rounding of 2^-24 each
    torch.testing.assert_close(applied + kept, due, rtol=0, atol=NUM_STEPS * 2**-24)


def train_without_some(set_to_none: bool, is_view: bool) -> tuple[Tensor, Tensor, int, Tensor]:
    """What was applied, what is kept, how much came for unused parameters, and all own gradients."""
    rank = dist.get_rank()
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": is_view}
    model = training.ddp(**options, **training.SMALL_BUCKETS)
    alone = training.make_net()  # the same parameters, outside DDP: what this rank's own gradient is
    exchange = regtopk.attach(model, regtopk.TopK(density=0.05), weight=WEIGHTS[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied = due = torch.zeros((), dtype=torch.float64)
    num_given = 0
    with training.closing(exchange):
        for step in range(NUM_STEPS):
            alone.load_state_dict(model.module.state_dict())
            alone.zero_grad()
            training.loss_of(alone, step, with_extra=step % 3 != 1).backward()
            due = due + training.flat_gradients(alone).double()
            optimizer.zero_grad(set_to_none=set_to_none)
            training.loss_of(model, step, with_extra=step % 3 != 1).backward()
            applied = applied + training.flat_gradients(model).double()
            if step % 3 == 1:
                grad = model.module.extra.weight.grad
                num_given += 0 if grad is None else int(grad.count_nonzero())
            optimizer.step()
        entries = exchange.state_dict()["workers"][str(rank)]["entries"]
        names = [name for name, _ in model.module.named_parameters()]
        residual = torch.cat([entries[name]["residual"].flatten() for name in names])
    return applied, residual.double(), num_given, due
