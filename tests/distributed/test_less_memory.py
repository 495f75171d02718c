"""What takes less memory: residuals in bfloat16, and theta_start in the CPU's memory."""

from typing import Any

import torch
from torch import Tensor

import regtopk
from regtopk.core.worker import Layout
from regtopk.simulate import Cluster
from tests.distributed import training
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.test_updates import nesterov, train

TOPK = regtopk.TopK(density=0.1, value_code="4bit")
NARROW: dict[str, Any] = {"residual_dtype": "bfloat16"}


def test_residuals_in_bfloat16_are_those_of_the_simulator(two_ranks: Ranks) -> None:
    grads, aggregates, residuals = (list(each) for each in zip(*two_ranks.run(exchange_narrow), strict=True))
    shapes = [(name, tuple(p.shape), "other") for name, p in training.make_net().named_parameters()]
    cluster = Cluster(TOPK, num_workers=2, layout=Layout.of_shapes(shapes), residual_dtype="bfloat16")
    for step in range(4):
        expected = cluster.step(torch.stack([mine[step] for mine in grads]))
        assert all(torch.equal(mine[step], expected) for mine in aggregates)
    state: Any = cluster.state
    assert state.residual.dtype == torch.bfloat16 and torch.equal(state.residual, torch.stack(residuals))


def exchange_narrow() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Gradients, aggregates and the residual at last; half-way the exchange goes on in another."""
    net = training.make_net()
    exchange = regtopk.Exchange(net, TOPK, **NARROW)
    grads, aggregates = [], []
    for step in range(4):
        net.zero_grad()
        training.loss_of(net, step).backward()
        grads.append(training.flat_gradients(net))
        exchange.step()
        aggregates.append(training.flat_gradients(net))
        if step == 1:
            saved = exchange.state_dict()
            exchange = regtopk.Exchange(net, TOPK, **NARROW)
            exchange.load_state_dict(saved)
    entries = exchange.state_dict()["workers"][str(exchange.rank)]["entries"]
    assert exchange.total.residual_norm > 0
    return grads, aggregates, torch.cat([fields["residual"].flatten() for fields in entries.values()])


@on_ranks(2)
def test_theta_start_in_the_cpus_memory_changes_no_bit() -> None:
    found, states = [], []
    for anchors in ("device", "cpu"):
        net = training.make_net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        options: dict[str, Any] = {"every": 2, "outer": nesterov, "anchors": anchors, **NARROW}
        with training.closing(regtopk.UpdateExchange(net, optimizer, TOPK, **options)) as exchange:
            for step in range(7):  # the last one is inside a round
                train(net, optimizer, range(step, step + 1))
                kept = exchange._model._kept
                starts = list(exchange._model.start.values())
                assert (kept is None) == (anchors == "device")
                assert kept is None or starts[0].data_ptr() == kept.data_ptr()
                if step == 4:
                    exchange.load_state_dict(exchange.state_dict())
            saved = exchange.state_dict()
            for worker in saved["workers"].values():
                del worker["total"]
            states.append(saved)
        found.append(training.flat_parameters(net))
    assert training.same(*states)
    assert torch.equal(*found)
