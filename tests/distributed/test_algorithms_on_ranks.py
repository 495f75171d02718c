"""Every algorithm on real ranks: bit for bit what the simulator makes of the same gradients."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from regtopk import Exchange
from regtopk.core.worker import Layout
from regtopk.simulate import Cluster
from tests.algorithms.cases import CASES, LAYOUT, Case, J, random_grads
from tests.distributed.ranks import Ranks

WEIGHTS = {2: [0.7, 0.3], 4: [0.4, 0.3, 0.2, 0.1]}
WITH_AN_IDLE_RANK = [0.0, 0.5, 0.3, 0.2]
NUM_STEPS = 6  # some algorithms decide something every 5 steps

ON_RANKS = [case for case in CASES if case.name != "global-topk"]  # the oracle: a cluster refuses it


class Net(nn.Module):
    """Parameters of the kinds and sizes that the contract's layout has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 5, 5, bias=False)
        self.linear = nn.Linear(10, 4, bias=False)
        self.norm = nn.LayerNorm(10, bias=False)


@dataclass
class Run:
    """What one rank saw."""

    layout: Layout
    aggregates: list[Tensor]
    payload_bytes: list[int]
    num_entries: list[int]
    state: dict[str, Tensor]


FIRST_VARIANTS = [case for case in ON_RANKS if case.is_first]
OTHER_VARIANTS = [case for case in ON_RANKS if not case.is_first]


@pytest.mark.parametrize("case", FIRST_VARIANTS, ids=str)
def test_four_ranks_equal_the_simulator(four_ranks: Ranks, case: Case) -> None:
    check(four_ranks, case, "4bit" if "4bit" in case.codes else case.codes[0], "all_gather")


@pytest.mark.parametrize("case", OTHER_VARIANTS, ids=str)
def test_two_ranks_equal_the_simulator(two_ranks: Ranks, case: Case) -> None:
    check(two_ranks, case, "4bit" if "4bit" in case.codes else case.codes[0], "all_gather")


@pytest.mark.parametrize("case", FIRST_VARIANTS, ids=str)
def test_sums_split_by_region_equal_the_simulator(two_ranks: Ranks, case: Case) -> None:
    check(two_ranks, case, case.codes[-1], "split")


@pytest.mark.parametrize("case", FIRST_VARIANTS, ids=str)
def test_a_rank_of_weight_zero_equals_the_simulator(four_ranks: Ranks, case: Case) -> None:
    check(four_ranks, case, case.codes[0], "all_gather", WITH_AN_IDLE_RANK)


def check(ranks: Ranks, case: Case, code: str, collective: str, weights: list[float] | None = None) -> None:
    weights = weights or WEIGHTS[ranks.num_ranks]
    runs: list[Run] = ranks.run(exchange_on_a_rank, case, code, collective, weights)
    num_ranks, layout = ranks.num_ranks, runs[0].layout
    assert sorted(layer.kind for layer in layout.layers) == ["conv", "linear", "norm"]
    cluster = Cluster(case.make(value_code=code), num_workers=num_ranks, weights=weights, layout=layout)
    for step, grads in enumerate(all_grads(num_ranks)):
        cluster.report(**report(step))
        expected = cluster.step(grads)
        for rank, run in enumerate(runs):
            assert torch.equal(run.aggregates[step], expected)
            assert run.num_entries[step] == cluster.last_step.num_entries[rank]
            if collective == "all_gather":  # what the simulator counts
                assert run.payload_bytes[step] == cluster.last_step.payload_bytes[rank]
    assert cluster.state is not None
    for name, rule in type(cluster.state).rules().items():
        tensor = getattr(cluster.state, name)
        for rank, run in enumerate(runs):
            assert torch.equal(run.state[name], tensor if rule == "shared" else tensor[rank]), name


def exchange_on_a_rank(case: Case, code: str, collective: Any, weights: list[float]) -> Run:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    net = Net()
    exchange = Exchange(net, case.make(value_code=code), weight=weights[rank], collective=collective)
    (bucket,) = exchange._steps.buckets.all
    run = Run(bucket.layout, [], [], [], {})
    for step, grads in enumerate(all_grads(num_ranks)):
        parts = grads[rank].split([p.numel() for p in net.parameters()])
        for p, part in zip(net.parameters(), parts, strict=True):
            p.grad = part.reshape(p.shape).clone()
        exchange.report(**report(step))
        exchange.step()
        run.aggregates.append(torch.cat([_grad(p).flatten() for p in net.parameters()]))
        run.payload_bytes.append(exchange.last_step.payload_bytes)
        run.num_entries.append(exchange.last_step.num_entries)
    run.state = bucket.state.state_dict()
    return run


def all_grads(num_ranks: int) -> list[Tensor]:
    assert sum(p.numel() for p in Net().parameters()) == J == LAYOUT.numel
    return random_grads(NUM_STEPS, num_ranks, J)


def report(step: int) -> dict[str, float]:
    """A loss that falls, and a time that changes."""
    return {"loss": 1 / (1 + step), "time_s": 0.1 + 0.01 * (step % 3)}


def _grad(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad
