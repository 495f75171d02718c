"""The exchange that frameworks' modules share: which models and options it takes, and what DDP does then."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from regtopk import TopK, UpdateExchange
from regtopk.errors import ArgumentError, ClusterError
from regtopk.integrations.wrapped import ExchangeInTrainer
from tests.distributed.ranks import Ranks

TOPK = TopK(density=0.5)


def told_of(model: nn.Module, what: Any = "updates", scaler: Any = None) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((ArgumentError, ClusterError)) as refused:
        ExchangeInTrainer("attach", TOPK, what, {})._make(model, [optimizer], scaler)
    return str(refused.value)


def refuse_models() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=mesh)
    scaler = torch.amp.GradScaler("cpu")
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    with_scaler = told_of(ddp, scaler=scaler)
    assert ddp.require_backward_grad_sync  # nothing has changed
    fsdp1 = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    return [told_of(fsdp1), told_of(sharded, "gradients"), told_of(nn.Linear(4, 4), "gradients"), with_scaler]


@pytest.mark.filterwarnings("default")  # torch's, of FSDP1
def test_models_that_are_refused(two_ranks: Ranks) -> None:
    for fsdp1, fsdp2, bare, scaled in two_ranks.run(refuse_models):
        assert fsdp1.startswith(
            "model must be wrapped in DistributedDataParallel by the trainer, got FullyShardedDataParallel: "
            "DeepSpeed, FSDP and tensor parallelism are not supported here"
        )
        assert "got FSDPLinear" in fsdp2 and "got Linear" in bare
        assert scaled.startswith("exchange must be 'gradients' with a GradScaler, got 'updates'")


def train_with_updates(**options: Any) -> tuple[list[torch.Tensor], torch.Tensor, int]:
    """Gradients of three local steps, buffers, and the bytes that the exchange sent."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    linear, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    network = nn.Sequential(linear, norm)
    ddp = DistributedDataParallel(network, **options)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    new = ExchangeInTrainer("attach", TOPK, "updates", {"every": 4, "buffers": "local"})
    exchange = new._make(ddp, [optimizer], None)
    assert isinstance(exchange, UpdateExchange)
    grads = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(8, 4, generator=generator)).square().sum().backward()
        assert linear.weight.grad is not None
        grads.append(linear.weight.grad.clone())
        optimizer.step()
    buffer = norm.get_buffer("running_mean").clone()
    sent = exchange.total.sent_bytes
    exchange.close()
    return grads, buffer, sent


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_with_updates_ddp_sends_nothing(two_ranks: Ranks, option: str) -> None:
    train = partial(train_with_updates, **{option: True})
    (grads, buffer, sent), (grads_elsewhere, buffer_elsewhere, _) = two_ranks.run(train)
    assert sent == 0
    for mine, theirs in zip(grads, grads_elsewhere, strict=True):
        assert not torch.equal(mine, theirs)  # each rank's own
    assert not torch.equal(buffer, buffer_elsewhere)


def test_options_are_checked_at_the_call() -> None:
    ExchangeInTrainer("attach", TOPK, "updates", {"every": 2, "fragments": 2})
    ExchangeInTrainer("attach", TOPK, "gradients", {"weight": 0.5})
    with pytest.raises(ArgumentError, match="exchange must be one of gradients, updates, got 'weights'"):
        ExchangeInTrainer("attach", TOPK, "weights", {})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="every must be given with exchange='updates' alone, got 'grad"):
        ExchangeInTrainer("attach", TOPK, "gradients", {"every": 2})
    with pytest.raises(TypeError, match=r"attach\(\) got an unexpected option 'process_group'"):
        ExchangeInTrainer("attach", TOPK, "updates", {"process_group": None})
