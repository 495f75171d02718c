"""No copy where none is needed, and no memory written over that somebody still reads."""

import torch
from torch import Tensor

from regtopk import TopK
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.buckets import Bucket
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


def make_bucket() -> Bucket:
    layout = Layout.anonymous(8)
    worker = Worker(torch.tensor(0.5), torch.tensor(0), 2, 0, layout)
    algorithm = TopK(k=2)
    return Bucket(("w",), layout, algorithm, worker, algorithm.init(worker))


def test_an_aggregates_memory_is_used_again() -> None:
    bucket, aggregate = make_bucket(), torch.ones(8)
    bucket.recycle(aggregate, None, flat=torch.ones(8))
    assert bucket.spare is not None and bucket.spare.vector is aggregate


def test_memory_that_is_in_use_is_left_alone() -> None:
    bucket, flat = make_bucket(), torch.ones(8)
    bucket.recycle(flat.view(8), None, flat)
    assert bucket.spare is None
    bucket.recycle(bucket.state.state_dict()["residual"].view(8), None, flat)
    assert bucket.spare is None


def test_a_state_that_is_taken_back_is_the_old_one() -> None:
    bucket = make_bucket()
    for step in (1.0, 2.0):
        before = bucket.state.clone().state_dict()
        bucket.keep_state()
        bucket.state.state_dict()["residual"].add_(step)
        bucket.take_back()
        assert torch.equal(bucket.state.state_dict()["residual"], before["residual"])
        bucket.state.state_dict()["residual"].add_(step)
