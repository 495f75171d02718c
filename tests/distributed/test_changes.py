"""What must not change once an exchange is made: refused before anything is lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regtopk
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.training import algorithm_state, closing, loss_of, make_net, refusal, same

TOPK = regtopk.TopK(density=0.1)


def add(net: Any) -> None:
    net.more = nn.Linear(2, 2)


def reshape(net: Any) -> None:
    net.last.bias.data = torch.zeros(1)


def replace(net: Any) -> None:
    net.last.bias = nn.Parameter(torch.zeros(3))


def unfreeze(net: Any) -> None:
    net.first.bias.requires_grad_(True)


def freeze(net: Any) -> None:
    net.last.bias.requires_grad_(False)


THERE = (
    "must have been there, requiring a gradient, when the exchange was made: make a new one (for DDP: wrap "
    "the model anew)"
)
CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "added": (add, f"parameter 'more.weight' of shape (2, 2) {THERE}"),
    "reshaped": (reshape, "parameter 'last.bias' must keep its shape (3,), got (1,)"),
    "replaced": (replace, f"parameter 'last.bias' of shape (3,) {THERE}"),
    "unfrozen": (unfreeze, f"parameter 'first.bias' of shape (40,) {THERE}"),
    "frozen": (
        freeze,
        "parameter 'last.bias' must keep requiring a gradient: to freeze it, make a new exchange",
    ),
}


@pytest.mark.parametrize("kind", ["exchange", "ddp"])
@pytest.mark.parametrize("case", CHANGES)
def test_parameters_that_change(two_ranks: Ranks, case: str, kind: str) -> None:
    assert two_ranks.run(change_parameters, case, kind) == [("ClusterError", CHANGES[case][1])] * 2


def change_parameters(case: str, kind: str) -> tuple[str, str]:
    net = make_net()
    net.first.bias.requires_grad_(False)
    if kind == "exchange":
        exchange: Any = regtopk.Exchange(net, TOPK)
        loss_of(net, 0).backward()
        exchange.step()
        before = algorithm_state(exchange)
        CHANGES[case][0](net)
        refused = refusal(exchange.step)
        assert same(algorithm_state(exchange), before)
        return refused
    model = DistributedDataParallel(net, find_unused_parameters=True)
    with closing(regtopk.attach(model, TOPK)) as exchange:
        loss_of(model, 0).backward()
        before = algorithm_state(exchange)
        model.zero_grad()
        CHANGES[case][0](net)
        refused = refusal(lambda: loss_of(model, 1).backward())
        assert same(algorithm_state(exchange), before)
        return refused


@on_ranks(2)
def test_sparse_gradients() -> None:
    net = nn.Embedding(5, 3)
    exchange = regtopk.Exchange(net, TOPK)
    net.weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[1]]), torch.ones(1, 3), (5, 3), check_invariants=True
    )
    refused = refusal(exchange.step)
    assert net.weight.grad.is_sparse
    text = "gradient of 'weight' has a sparse layout, which is not supported"
    assert refused == ("ClusterError", text)


@on_ranks(2)
def test_ranks_at_different_steps() -> None:
    net = make_net()
    exchange = regtopk.Exchange(net, TOPK)
    saved = []
    for step in range(2):
        loss_of(net, step).backward()
        exchange.step()
        saved.append(exchange.state_dict())
    exchange.load_state_dict(saved[1 - dist.get_rank()])
    refused = refusal(exchange.step)
    exchange.load_state_dict(saved[0])
    exchange.step()  # nothing was lost: with the right file it goes on
    text = (
        "all ranks must exchange the same parameters at the same step, got step 2 on rank 0, step 1 on rank 1"
    )
    assert refused == ("ClusterError", text)


def test_ranks_that_select_different_numbers(two_ranks: Ranks) -> None:
    text = (
        "all ranks must select equally many entries of every bucket, got 336 on rank 0, 673 on rank 1 in all"
    )
    expected = [("ClusterError", f"{text}; this rank [{k}]") for k in (336, 673)]
    assert two_ranks.run(select_by_rank) == expected


def select_by_rank() -> tuple[str, str]:
    net = make_net()
    exchange = regtopk.Exchange(net, regtopk.TopK(density=density_of_this_rank))
    loss_of(net, 0).backward()
    before = algorithm_state(exchange)
    refused = refusal(exchange.step)
    assert same(algorithm_state(exchange), before)
    return refused


def density_of_this_rank(step: int) -> float:
    return 0.1 * (1 + dist.get_rank())
