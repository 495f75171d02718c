"""One process: a script for many runs on it, and says that nothing is saved."""

from typing import Any

import pytest
import torch
from torch import nn

import regtopk
from regtopk.errors import ClusterError, StateError
from tests.distributed.ranks import Ranks
from tests.distributed.training import flat_parameters, loss_of, make_net

REGTOPK = regtopk.RegTopK(density=0.1)


def train(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        net(torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_plain_model_is_left_as_it_is(is_compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
    net, alone = make_net(), make_net()
    model: Any = torch.compile(net, backend="eager") if is_compiled else net
    exchange = regtopk.attach(model, REGTOPK, dense_steps=3)
    assert caplog.messages == [
        "Net is not wrapped in DistributedDataParallel, and there is one process: nothing is exchanged"
    ]
    train(net)
    train(alone)
    assert torch.equal(flat_parameters(net), flat_parameters(alone))
    assert exchange.summary() == "regtopk: one process, nothing was exchanged"
    assert exchange.total.sent_bytes == exchange.num_steps == 0
    assert exchange.num_workers == 1 and exchange.rank == 0
    exchange.detach()
    exchange.close()


def test_a_checkpoint_of_two_ranks_passes_through(two_ranks: Ranks) -> None:
    gathered = two_ranks.run(train_and_gather)[0]
    exchange = regtopk.attach(make_net(), REGTOPK)
    exchange.load_state_dict(gathered)
    state = exchange.gather_state_dict()
    assert state is not None and state["num_steps"] == 2
    first, second = (gathered["workers"][rank]["entries"] for rank in "01")
    for name, entry in state["workers"]["0"]["entries"].items():
        mean = 0.5 * first[name]["residual"] + 0.5 * second[name]["residual"]
        assert torch.equal(entry["residual"], mean)
    two_ranks.run(load, state)


def train_and_gather() -> Any:
    net = make_net()
    exchange = regtopk.Exchange(net, REGTOPK)
    for step in range(2):
        loss_of(net, step).backward()
        exchange.step()
    return exchange.gather_state_dict()


def load(state: dict[str, Any]) -> None:
    exchange = regtopk.Exchange(make_net(), REGTOPK)
    exchange.load_state_dict(state)
    exchange.step()
    assert exchange.num_steps == 3


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_forgotten_under_a_launcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes, none of which joined a process group or wrapped its model."""
    monkeypatch.setenv(name, "4")
    with pytest.raises(ClusterError, match="model must be a DistributedDataParallel, got Net"):
        regtopk.attach(make_net(), REGTOPK)


def test_updates_of_several_ranks_are_refused() -> None:
    exchange = regtopk.attach(make_net(), REGTOPK)
    text = "the saved state must be of an exchange of gradients, got one of updates: load it into an "
    with pytest.raises(StateError, match=f"^{text}UpdateExchange, which needs a process group$"):
        exchange.load_state_dict({**exchange.state_dict(), "updates": {}})
