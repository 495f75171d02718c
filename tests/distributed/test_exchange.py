"""Exchange without DDP: `.step()` between backward and the optimizer, and all options; and one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk.errors import ClusterError, StateError
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.test_updates import mean_over_ranks
from tests.distributed.training import closing, flat_gradients, flat_parameters, loss_of, make_net

J = 3363


def own_gradients(net: nn.Module, step: int) -> Tensor:
    """What this rank's backward alone gives."""
    net.zero_grad()
    loss_of(net, step).backward()
    return flat_gradients(net)


@on_ranks(2)
def test_step_averages_and_counts_missing_gradients_as_zero() -> None:
    net = make_net()
    exchange = regtopk.Exchange(net, regtopk.TopK(density=1.0))
    own_gradients(net, 0)
    if dist.get_rank() == 0:
        net.extra.weight.grad = None
    net.last.bias.grad = None  # on both ranks
    assert net.first.bias.grad is not None
    net.first.bias.grad = net.first.bias.grad[:1].expand(net.first.bias.shape)  # in the memory of one entry
    expected = mean_over_ranks(flat_gradients(net))
    exchange.step()
    assert torch.equal(flat_gradients(net), expected)
    assert net.last.bias.grad is not None and not net.last.bias.grad.any()


@on_ranks(2)
def test_what_requires_a_graph_is_exchanged_without_one() -> None:
    net = make_net()
    exchange = regtopk.Exchange(net, regtopk.TopK(density=0.1))
    for _ in range(2):
        loss = loss_of(net, 0)
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        for p, grad in zip(net.parameters(), grads, strict=True):
            p.grad = grad
        exchange.step()
    state = exchange.state_dict()["workers"][str(dist.get_rank())]
    assert not any(entry["residual"].requires_grad for entry in state["entries"].values())


@on_ranks(2)
def test_parameters_without_entries_and_without_an_algorithm() -> None:
    net = make_net()
    net.empty = nn.Parameter(torch.zeros(0, 4))
    for skip in (None, lambda name, p: name == "empty", lambda name, p: True):
        exchange = regtopk.Exchange(net, regtopk.TopK(density=1.0), skip=skip)
        expected = mean_over_ranks(own_gradients(net, 0))
        exchange.step()
        assert torch.equal(flat_gradients(net), expected) and exchange.last_step.residual_norm == 0
        exchange.load_state_dict(exchange.state_dict())


@pytest.mark.parametrize("is_ddp", [True, False])
def test_subgroups_do_not_mix(four_ranks: Ranks, is_ddp: bool) -> None:
    found = four_ranks.run(train_in_a_subgroup, is_ddp)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


def train_in_a_subgroup(is_ddp: bool) -> Tensor:
    rank = dist.get_rank()
    dist.new_group([0, 1])  # so that not all ranks are in equally many groups
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    net, algorithm = make_net(), regtopk.RegTopK(density=0.1)
    model = DistributedDataParallel(net, process_group=group) if is_ddp else net
    exchange: Any = (
        regtopk.attach(model, algorithm) if is_ddp else regtopk.Exchange(net, algorithm, process_group=group)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if not is_ddp:
            exchange.step()
        optimizer.step()
    assert exchange.num_workers == 2 and exchange.rank == rank // 2
    exchange.close()
    return flat_parameters(net)


@on_ranks(2)
def test_skip_sends_dense() -> None:
    net = make_net()
    exchange = regtopk.Exchange(net, regtopk.TopK(density=0.1), skip=lambda name, p: p.ndim <= 1)
    num_biases = sum(p.numel() for p in net.parameters() if p.ndim <= 1)
    for step in range(3):
        expected = mean_over_ranks(own_gradients(net, step))
        exchange.step()
        found = flat_gradients(net)
        is_bias = torch.cat([torch.full((p.numel(),), p.ndim <= 1) for p in net.parameters()])
        assert torch.equal(found[is_bias], expected[is_bias])
        k = round(0.1 * (J - num_biases))
        assert k <= found[~is_bias].count_nonzero() <= 2 * k
        assert exchange.last_step.num_entries == k + num_biases
    entries = exchange.state_dict()["workers"][str(dist.get_rank())]["entries"]
    assert {name for name, fields in entries.items() if fields} == {
        name for name, p in net.named_parameters() if p.ndim > 1
    }


@on_ranks(2)
def test_dense_steps_come_first_and_density_follows_the_step() -> None:
    model = DistributedDataParallel(make_net())
    schedule = regtopk.WarmUp(density=0.01, num_steps=5)
    with closing(regtopk.attach(model, regtopk.RegTopK(density=schedule), dense_steps=3)) as exchange:
        for step in range(7):
            model.zero_grad()
            alone = make_net()
            expected = mean_over_ranks(own_gradients(alone, step))
            loss_of(model, step).backward()
            is_dense = step < 3
            assert torch.equal(flat_gradients(model), expected) == is_dense
            assert exchange.last_step.num_entries == (J if is_dense else round(schedule(step) * J))
            assert (exchange.last_step.residual_norm == 0) == is_dense


@on_ranks(4)
def test_auto_takes_the_collective_computed_to_be_cheaper() -> None:
    """At 30 % on four ranks the union of the supports is nearly dense, so a split by region moves less.

    But it makes four trips, where messages as short as these make one.
    """
    far, near = regtopk.Link(bandwidth=1e9, latency_s=0.1), regtopk.Link(bandwidth=1e3)
    for density, link, cheaper in (
        (0.3, None, "split"),
        (0.3, far, "all_gather"),
        (0.3, near, "split"),
        (0.01, None, "all_gather"),
    ):
        received = {}
        for collective in ("auto", "all_gather", "split"):
            net, algorithm = make_net(), regtopk.TopK(density=density)
            exchange = regtopk.Exchange(net, algorithm, collective=collective, link=link)
            own_gradients(net, 0)
            exchange.step()
            received[collective] = exchange.last_step.received_bytes
        assert received["auto"] == received[cheaper]
        assert received["split"] != received["all_gather"]
        assert density == 0.01 or received["split"] < received["all_gather"]


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
