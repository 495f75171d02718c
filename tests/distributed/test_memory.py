"""No copy where none is needed, and no memory written over that somebody still reads."""

import numpy as np
import torch
from torch import Tensor

from regtopk import TopK
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.requests.rank import Total
from regtopk.distributed.state.buckets import Bucket, as_flat
from regtopk.kernels import Support


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
    numbers = np.zeros(8, np.float32)  # neighbours in memory, but not torch's
    assert as_flat([torch.from_numpy(numbers[:4]), torch.from_numpy(numbers[4:])], torch.float32) is None


def make_bucket() -> Bucket:
    layout = Layout.anonymous(8)
    worker = Worker(torch.tensor(0.5), torch.tensor(0), 2, 0, layout)
    algorithm = TopK(k=2)
    return Bucket(("w",), algorithm, worker, algorithm.init(worker))


def test_the_memory_of_a_sparse_sum_is_cleared_where_it_is_not_zero() -> None:
    indices = torch.tensor([[3, 700], [3, 999]])

    def total_of(vector: Tensor) -> Total:
        return Total(vector, Support(indices, torch.tensor([2, 2])), vector._version)

    vector = torch.zeros(1000).index_fill_(0, indices.flatten(), 5.0)
    vector[500] = 7.0  # not in the support: if nobody wrote to it, it would be zero
    assert total_of(vector).cleared().nonzero().flatten().tolist() == [500]
    kept = total_of(vector)
    vector[501] = 7.0  # somebody did
    assert not kept.cleared().any()
    vector = torch.ones(63)  # so few entries are written as fast as they are looked for
    assert not Total(vector, Support(indices % 63, torch.tensor([2, 2])), vector._version).cleared().any()


def test_memory_that_is_in_use_is_left_alone() -> None:
    bucket, flat = make_bucket(), torch.ones(8)
    bucket.sums.recycle(flat.view(8), flat)
    assert bucket.sums.spare is None
    residual = bucket.state.state_dict()["residual"]
    bucket.sums.recycle(residual.view(8), flat, residual)
    assert bucket.sums.spare is None
