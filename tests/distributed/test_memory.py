"""No copy where none is needed, no memory written over that somebody still reads, and what takes less."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

import regtopk
from regtopk import TopK
from regtopk.core.sparse import SparseGradient
from regtopk.core.worker import Layout, Worker
from regtopk.distributed.requests.rank import SumBuffer, Total
from regtopk.distributed.state.buckets import Bucket, as_flat
from regtopk.kernels import Support
from tests.distributed import training
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.test_equals_simulator import compare, grads_of
from tests.distributed.test_updates import nesterov, train


def parts(buffer: Tensor) -> list[Tensor]:
    return [buffer[1:3], buffer[3:9].view(2, 3)]


def test_memory_for_sums_can_be_cleared_before_it_is_needed() -> None:
    sums, sparse = SumBuffer(), SparseGradient(torch.tensor([[1]]), torch.ones(1, 1), 40)
    sums.clear_spare()
    total = sums.zeros_for(sparse)
    total[1] = 2.0
    sums.keep(total, sparse.indices, sparse.counts)
    sums.recycle(total)
    for _ in range(2):
        sums.clear_spare()
        assert total.count_nonzero() == 0
    assert sums.zeros_for(sparse) is total and sums.spare is None


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
    worker, algorithm = Worker(torch.tensor(0.5), torch.tensor(0), 2, 0, Layout.anonymous(8)), TopK(k=2)
    bucket, flat = Bucket(("w",), algorithm, worker, algorithm.init(worker)), torch.ones(8)
    bucket.sums.recycle(flat.view(8), flat)
    assert bucket.sums.spare is None
    residual = bucket.state.state_dict()["residual"]
    bucket.sums.recycle(residual.view(8), flat, residual)
    assert bucket.sums.spare is None


# Residuals in bfloat16, and theta_start in the CPU's memory.

TOPK = regtopk.TopK(density=0.1, value_code="4bit")
NARROW: dict[str, Any] = {"residual_dtype": "bfloat16"}


def test_residuals_in_bfloat16_are_those_of_the_simulator(two_ranks: Ranks) -> None:
    compare(two_ranks, TOPK, grads_of(4, num_ranks=2), **NARROW)


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
