"""The exchange that frameworks' modules share: which models and options it takes, and what DDP does then."""

import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from regtopk import TopK, UpdateExchange
from regtopk.errors import ArgumentError, MissingExtraError
from regtopk.integrations.wrapped import ExchangeInTrainer
from tests.distributed.ranks import on_ranks
from tests.distributed.test_updates import is_same_on_all_ranks
from tests.refusals import refusal

TOPK = TopK(density=0.5)


def told_of(model: nn.Module, what: Any = "updates", scaler: Any = None, **options: Any) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    new = ExchangeInTrainer("attach", TOPK, what, options)
    return refusal(lambda: new._make(model, [optimizer], scaler))[1]


@pytest.mark.filterwarnings("default")  # torch's, of FSDP1
@on_ranks(2)
def test_models_that_are_refused() -> None:
    sharded: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    fsdp1 = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    assert told_of(fsdp1) == (
        "model must be wrapped in DistributedDataParallel by the trainer, got FullyShardedDataParallel: "
        "DeepSpeed, FSDP and tensor parallelism are not supported here (for sharded models use "
        "regtopk.UpdateExchange in a loop of your own)"
    )
    assert "got FSDPLinear" in told_of(sharded, "gradients")
    assert "got Linear" in told_of(nn.Linear(4, 4), "gradients")
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    assert told_of(ddp, scaler=torch.amp.GradScaler("cpu")) == (
        "exchange must be 'gradients' with a GradScaler, got 'updates': a step that overflows is skipped "
        "on one rank alone, and ranks would count steps differently. Train in bfloat16"
    )
    every = 2 + torch.distributed.get_rank()
    assert told_of(ddp, every=every) == "every must be the same on all ranks in a trainer, got [2, 3] by rank"
    assert ddp.require_backward_grad_sync  # nothing has changed


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@on_ranks(2)
def test_with_updates_ddp_sends_nothing(options: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    linear, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    network = nn.Sequential(linear, norm)
    ddp = DistributedDataParallel(network, **options)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    new = ExchangeInTrainer("attach", TOPK, "updates", {"every": 4, "buffers": "local"})
    exchange = new._make(ddp, [optimizer], None)
    assert isinstance(exchange, UpdateExchange)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(8, 4, generator=generator)).square().sum().backward()
        assert linear.weight.grad is not None
        assert not is_same_on_all_ranks(linear.weight.grad)  # each rank's own
        optimizer.step()
    assert not is_same_on_all_ranks(norm.get_buffer("running_mean")) and exchange.total.sent_bytes == 0
    exchange.close()


@pytest.mark.parametrize("extra", ["huggingface", "lightning", "torchft", "flower"])
def test_a_missing_package_is_named(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = {"huggingface": "transformers", "flower": "flwr"}.get(extra, extra)
    module = f"regtopk.integrations.{extra}" + (".app" if extra == "flower" else "")
    flower = "the Flower integration needs flwr 1.41 or later"
    needs = flower if extra == "flower" else f"{module} needs {package}"
    for name in (module, *(name for name in sys.modules if name.startswith(f"{package}."))):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # which no import finds
    with pytest.raises(MissingExtraError) as refused:
        import_module(module)
    where = {
        "torchft": ", on x86_64 Linux with Python 3.10 to 3.13; torchft has no wheels for others",
        "flower": ", with Python 3.11 or later",
    }.get(extra, "")
    assert str(refused.value) == f"{needs}: pip install 'regtopk[{extra}]'{where}"


def test_options_are_checked_at_the_call() -> None:
    ExchangeInTrainer("attach", TOPK, "updates", {"every": 2, "fragments": 2})
    ExchangeInTrainer("attach", TOPK, "gradients", {"weight": 0.5})
    with pytest.raises(ArgumentError, match="exchange must be one of gradients, updates, got 'weights'"):
        ExchangeInTrainer("attach", TOPK, "weights", {})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="every must be given with exchange='updates' alone, got 'grad"):
        ExchangeInTrainer("attach", TOPK, "gradients", {"every": 2})
    with pytest.raises(ArgumentError, match="algorithm must be an Algorithm such as"):
        ExchangeInTrainer("attach", "topk", "updates", {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"attach\(\) got an unexpected option 'process_group'"):
        ExchangeInTrainer("attach", TOPK, "updates", {"process_group": None})


@pytest.mark.parametrize(
    ("option", "value"),
    [("every", 0), ("fragments", 3), ("mix", 2.0), ("buffers", "sum"), ("anchors", "disk"), ("skip", "bias")],
)
def test_values_are_checked_at_the_call(option: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{option} must be .* got {value!r}"):
        ExchangeInTrainer("attach", TOPK, "updates", {option: value})


def test_one_process_is_refused_what_many_are() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ArgumentError, match=r"weight must be .* got -1 on rank 0"):
        ExchangeInTrainer("attach", TOPK, "updates", {"weight": -1})._make(model, [], None)
    one = ExchangeInTrainer("attach", TOPK, "updates", {"every": 2, "weight": 0.5})
    assert one._make(model, [], None).num_workers == 1
