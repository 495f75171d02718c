"""What an exchange needs among ranks that come and go, on ranks that stay."""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from regtopk import RegTopK
from regtopk.distributed.options import Options
from regtopk.distributed.requests.rank import Rank
from regtopk.distributed.state.parameters import Parameters
from regtopk.distributed.steps.step import Kind, Steps
from regtopk.distributed.transport.collectives import Alone, BareCollectives, Collectives, group_or_default
from regtopk.distributed.updates.model import ModelBuffers
from tests.distributed.ranks import on_ranks


@on_ranks(2)
def test_a_group_without_a_name_gives_what_one_with_a_name_gives() -> None:
    known = Collectives(group_or_default(None))
    bare = BareCollectives(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    rank = known.rank
    numbers = torch.arange(5.0) * (rank + 1) - 3
    parts = [torch.full((rank + 1 + to,), 10 * rank + to, dtype=torch.uint8) for to in range(2)]
    for ask in (
        lambda c: c.all_gather(numbers),
        lambda c: c.maximum(numbers.clone()),
        lambda c: c.all_reduce(numbers.clone()),
        lambda c: c.broadcast(numbers.clone(), 1),
        lambda c: torch.cat(c.all_to_all(parts, [rank + 1, rank + 2])),
    ):
        assert torch.equal(ask(bare), ask(known))
    things = [{"rank": n, "long": "x" * 1000 * n} for n in range(2)]
    assert bare.all_gather_objects(things[rank]) == things


@on_ranks(2)
def test_steps_go_on_among_other_ranks() -> None:
    model = nn.Linear(6, 4, bias=False)
    grads = {"weight": torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))}
    make = partial(Steps, Parameters(model), RegTopK(density=0.25), kind=Kind("test"))
    steps = make(Alone(), Options())
    group = Collectives(group_or_default(None))
    weights = torch.tensor([0.25, 0.75], dtype=torch.float64)
    steps.regroup(group, weights)
    same = make(group, Options(weight=float(weights[group.rank])))
    for _ in range(3):
        ours, theirs = copy.deepcopy(grads), copy.deepcopy(grads)
        steps.run(ours)
        same.run(theirs)
        assert torch.equal(ours["weight"], theirs["weight"])

    (old,) = (bucket.state.state_dict() for bucket in steps.buckets.all)
    steps.regroup(group, torch.tensor([1.0, 0.0], dtype=torch.float64))
    (bucket,) = steps.buckets.all
    new = bucket.state.state_dict()
    assert torch.equal(new["residual"], old["residual"])  # its own, to the bit
    assert bool(new["residual"].any()) and bool(old["own"].any())
    assert not bool(new["own"].any())  # the last selection has another meaning now
    assert float(bucket.worker.weight) == float(group.rank == 0)

    steps.begin_from(steps.buckets.shared(), 9, is_late=True)
    assert torch.equal(steps.buckets.all[0].state.state_dict()["residual"], old["residual"])
    steps.begin_from(steps.buckets.shared(), 9)
    assert not bool(steps.buckets.all[0].state.state_dict()["residual"].any())  # as a new rank's


@on_ranks(2)
def test_buffers_stay_as_each_rank_has_them_until_they_are_put() -> None:
    norm = nn.BatchNorm1d(3)
    buffers = ModelBuffers(norm, "mean")
    norm(torch.randn(8, 3) + dist.get_rank())
    own = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    begun = {name: buffer.clone() for name, buffer in buffers.saved()["start"].items()}
    rank = Rank(Collectives(group_or_default(None)), torch.tensor([0.5, 0.5], dtype=torch.float64))
    joined = buffers.joined(rank, torch.device("cpu"), buffers.named)
    assert not torch.equal(joined["running_mean"], own["running_mean"])
    for now, was in ((dict(norm.named_buffers()), own), (buffers.saved()["start"], begun)):
        assert all(torch.equal(now[name], buffer) for name, buffer in was.items())
    buffers.put(joined)
    assert all(torch.equal(buffer, joined[name]) for name, buffer in norm.named_buffers())
    assert all(torch.equal(start, joined[name]) for name, start in buffers.saved()["start"].items())
