"""A parameter that no rank used in a step loses nothing, though DDP drops what a hook returns for it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import regtopk
from tests.distributed.ranks import Ranks
from tests.distributed.training import SMALL_BUCKETS, closing, ddp, flat_gradients, loss_of, make_net

NUM_STEPS = 15
WEIGHTS = [0.7, 0.3]


@pytest.mark.parametrize("is_view", [False, True], ids=["copies", "views of buckets"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_applied_plus_residual_is_the_sum_of_gradients(
    two_ranks: Ranks, set_to_none: bool, is_view: bool
) -> None:
    found = two_ranks.run(train, set_to_none, is_view)
    applied, num_given = found[0][0], found[0][2]
    assert torch.equal(applied, found[1][0])
    assert num_given > 0  # entries did come for the unused layer: the case is not empty
    kept = sum(weight * residual for weight, (_, residual, _, _) in zip(WEIGHTS, found, strict=True))
    due = sum(weight * grads for weight, (_, _, _, grads) in zip(WEIGHTS, found, strict=True))
    # float32 sums of 15 steps of numbers below 1: a rounding of 2^-24 each
    torch.testing.assert_close(applied + kept, due, rtol=0, atol=NUM_STEPS * 2**-24)


def train(set_to_none: bool, is_view: bool) -> tuple[Tensor, Tensor, int, Tensor]:
    """What was applied, what is kept, how much came for unused parameters, and all own gradients."""
    rank = dist.get_rank()
    model = ddp(find_unused_parameters=True, gradient_as_bucket_view=is_view, **SMALL_BUCKETS)
    alone = make_net()  # the same parameters, outside DDP: what this rank's own gradient is
    exchange = regtopk.attach(model, regtopk.TopK(density=0.05), weight=WEIGHTS[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied = due = torch.zeros((), dtype=torch.float64)
    num_given = 0
    with closing(exchange):
        for step in range(NUM_STEPS):
            alone.load_state_dict(model.module.state_dict())
            alone.zero_grad()
            loss_of(alone, step, with_extra=step % 3 != 1).backward()
            due = due + flat_gradients(alone).double()
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, step, with_extra=step % 3 != 1).backward()
            applied = applied + flat_gradients(model).double()
            if step % 3 == 1:
                num_given += count(model.module.extra.weight.grad)
            optimizer.step()
        entries = exchange.state_dict()["workers"][str(rank)]["entries"]
        names = [name for name, _ in model.module.named_parameters()]
        residual = torch.cat([entries[name]["residual"].flatten() for name in names])
    return applied, residual.double(), num_given, due


def count(grad: Any) -> int:
    return 0 if grad is None else int(grad.count_nonzero())
