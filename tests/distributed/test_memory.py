"""No copy where none is needed, and no memory written over that somebody still reads."""

import torch
from torch import Tensor

from regtopk import TopK
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.groups import Group
from regtopk.distributed.layout import as_flat


def parts(buffer: Tensor) -> list[Tensor]:
    return [buffer[1:3], buffer[3:9].view(2, 3)]


def test_gradients_one_after_another_are_one_vector() -> None:
    buffer = torch.arange(10.0)
    flat = as_flat(parts(buffer), torch.float32)
    assert flat is not None and torch.equal(flat, buffer[1:9])
    flat.zero_()
    assert buffer[1:9].count_nonzero() == 0  # the same memory


def test_other_gradients_are_not() -> None:
    buffer = torch.arange(10.0)
    first, second = parts(buffer)
    assert as_flat([second, first], torch.float32) is None
    assert as_flat([first, second.clone()], torch.float32) is None
    assert as_flat([first, second.t()], torch.float32) is None
    assert as_flat([first, second], torch.float64) is None


def make_group() -> Group:
    layout = Layout.anonymous(8)
    worker = Worker(torch.tensor(0.5), torch.tensor(0), 2, 0, layout)
    algorithm = TopK(k=2)
    return Group(("w",), layout, algorithm, worker, algorithm.init(worker))


def test_an_aggregates_memory_is_used_again() -> None:
    group, aggregate = make_group(), torch.ones(8)
    group.recycle(aggregate, flat=torch.ones(8))
    assert group.room is aggregate


def test_memory_that_is_in_use_is_left_alone() -> None:
    group, flat = make_group(), torch.ones(8)
    group.recycle(flat.view(8), flat)
    assert group.room is None
    group.recycle(group.state.state_dict()["residual"].view(8), flat)
    assert group.room is None


def test_a_state_that_is_taken_back_is_the_old_one() -> None:
    group = make_group()
    for step in (1.0, 2.0):
        before = group.state.clone().state_dict()
        group.remember_state()
        group.state.state_dict()["residual"].add_(step)
        group.take_back_state()
        assert torch.equal(group.state.state_dict()["residual"], before["residual"])
        group.state.state_dict()["residual"].add_(step)
