import pytest
import torch

from regtopk import wire
from regtopk.core.codes import VALUE_CODES
from regtopk.core.sparse import (
    SparseGradient,
    clear_at_,
    find_largest_,
    send_instead_,
    take,
    take_above_,
    take_all_above_,
    take_at_,
    take_largest_,
    take_where_,
    to_dense,
)
from regtopk.errors import ArgumentError, WireFormatError


@pytest.mark.parametrize("code", VALUE_CODES)
def test_an_overflowing_sum_is_not_sent_as_a_finite_number(code: str) -> None:
    residual, grad = torch.full((300,), 1.0), torch.full((300,), 2.0)
    residual[7] = grad[7] = 3e38
    sent = take_largest_(residual, grad, 200, code=code)
    assert not bool(sent.values[sent.indices == 7].isfinite().any())
    with pytest.raises(WireFormatError, match=r"residual \+ gradient has overflowed"):
        wire.decode(wire.encode(sent), 300)


def test_one_support_serves_all_rows_with_or_without_a_gradient() -> None:
    residual = torch.arange(6.0).reshape(2, 3)
    values = take_at_(residual, torch.ones(2, 3), torch.tensor([0, 2]))
    assert values.tolist() == [[1.0, 3.0], [4.0, 6.0]]
    assert take_at_(residual, None, torch.tensor([1])).tolist() == [[2.0], [5.0]]
    assert not bool(residual.any())


def test_the_largest_of_every_chunk_are_coded_too() -> None:
    residual, grad = torch.zeros(5), torch.tensor([1 / 3, 0.1, 0.1, -3.0, 0.5])
    sent = take_largest_(residual, grad, 1, chunk=2, code="bfloat16")
    third = float(torch.tensor(1 / 3).bfloat16())
    assert sent.indices.tolist() == [0, 3, 4] and sent.code == "bfloat16" and sent.count is None
    assert sent.values.tolist() == [third, -3.0, 0.5]
    assert torch.equal(sent.values, grad[sent.indices] - residual[sent.indices])


def test_padding_does_not_erase_the_residual_of_entry_0() -> None:
    residual = torch.tensor([[0.25, 3.0, 0.5], [1.0, 2.0, -1 / 3]])
    before = residual.clone()
    sent = take_above_(residual, None, torch.tensor([1.0, 0.3]), capacity=3, code="bfloat16")
    assert sent.counts.tolist() == [1, 3] and sent.indices[0].tolist() == [1, 0, 0]
    assert residual[0].tolist() == [0.25, 0.0, 0.5]
    third = -float(torch.tensor(1 / 3).bfloat16())
    assert sent.values[1].tolist() == [1.0, 2.0, third]
    assert torch.equal(residual[1], before[1] - sent.values[1])


def test_finding_the_largest_leaves_them_there() -> None:
    residual, grad = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([1.0, -4.0, 0.0])
    assert find_largest_(residual, grad, 2).tolist() == [1, 2]
    assert residual.tolist() == [2.0, -4.0, 5.0]
    damped, scores = torch.tensor([2]), torch.tensor([0.5])
    assert find_largest_(residual, torch.zeros(3), 2, damped=damped, scores=scores).tolist() == [0, 1]


def test_what_a_mask_takes_and_what_is_sent_in_its_place() -> None:
    residual = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]])
    is_taken = torch.tensor([[False, True, True], [False, False, True]])
    taken = take_where_(residual, is_taken)
    assert taken.counts.tolist() == [2, 1] and taken.indices.tolist() == [[1, 2], [2, 0]]
    assert taken.values.tolist() == [[-2.0, 3.0], [6.0, 0.0]]
    assert residual.tolist() == [[1.0, 0.0, 0.0], [4.0, 5.0, 0.0]]
    sent = send_instead_(residual, taken, 4 * taken.values.sign(), "sign")
    assert sent.values.tolist() == [[-4.0, 4.0], [4.0, 0.0]]
    assert residual.tolist() == [[1.0, 2.0, -1.0], [4.0, 5.0, 2.0]]


def test_a_mask_of_nothing_takes_nothing() -> None:
    residual = torch.tensor([1.0, 2.0])
    taken = take_where_(residual, torch.zeros(2, dtype=torch.bool), code="4bit")
    assert int(taken.counts) == 0 and taken.indices.tolist() == [0]
    assert residual.tolist() == [1.0, 2.0]


def test_a_threshold_without_a_limit_takes_more_than_expected() -> None:
    torch.manual_seed(0)
    residual, grad = torch.randn(3, 500), torch.randn(3, 500)
    accumulated, threshold = residual + grad, torch.tensor([3.0, 1.0, 0.1])
    sent = take_all_above_(residual, grad, threshold, expected=20)
    is_taken = accumulated.abs() >= threshold.unsqueeze(-1)
    assert sent.counts.tolist() == is_taken.sum(-1).tolist() and int(sent.counts.max()) > 40
    assert torch.equal(residual, accumulated.where(~is_taken, 0.0))


def test_what_finds_no_room_is_counted_and_stays() -> None:
    residual, grad = torch.zeros(6), torch.tensor([3.0, 1.0, -4.0, 0.5, 5.0, -6.0])
    sent = take_above_(residual, grad, 3.0, 2)
    assert sent.indices.tolist() == [0, 2]
    assert residual.tolist() == [0.0, 1.0, 0.0, 0.5, 5.0, -6.0]


@pytest.mark.parametrize("damped", [[[1, 2, 3], [0, 5, 4]], [[1, 2, 3], [0, 4, 4]]])
def test_damped_entries_that_do_not_ascend_are_refused(damped: list[list[int]]) -> None:
    residual, scores = torch.zeros(2, 8), torch.zeros(2, 3)
    for selection in (take_largest_, find_largest_):
        text = f"damped must hold each entry once, ascending, got {damped[1][1]} before 4"
        with pytest.raises(ArgumentError, match=text):
            selection(residual, torch.ones(2, 8), 2, damped=torch.tensor(damped), scores=scores)
    assert not residual.any()


def test_padding_is_ignored_whatever_it_holds() -> None:
    indices = torch.tensor([[1, 4, 10**12], [-5, -5, -5]])
    values = torch.tensor([[2.0, 3.0, torch.nan], [torch.inf] * 3])
    sparse = SparseGradient(indices, values, numel=6, count=torch.tensor([2, 0]))
    assert sparse.counts.tolist() == [2, 0]
    clean_indices, clean_values = sparse.without_padding()
    assert clean_indices.tolist() == [[1, 4, 0], [0, 0, 0]]
    assert clean_values.tolist() == [[2.0, 3.0, 0.0], [0.0, 0.0, 0.0]]


def test_take_reads_a_received_vector_at_each_workers_own_entries() -> None:
    received = torch.tensor([10.0, 11.0, 12.0])
    assert take(received, torch.tensor([2, 0])).tolist() == [12.0, 10.0]
    assert take(received, torch.tensor([[2], [1]])).tolist() == [[12.0], [11.0]]
    by_replica = torch.stack([received, received + 10]).unsqueeze(-2)  # (R, 1, J)
    at = torch.tensor([[[0], [1]], [[2], [2]]])  # (R, N, m)
    assert take(by_replica, at).tolist() == [[[10.0], [11.0]], [[22.0], [22.0]]]


def test_to_dense_is_zero_elsewhere() -> None:
    assert to_dense(torch.tensor([3, 1]), torch.tensor([5.0, 7.0]), 4).tolist() == [0.0, 7.0, 0.0, 5.0]
    batch = to_dense(torch.tensor([[0], [1]]), torch.tensor([[5.0], [7.0]]), 2)
    assert batch.tolist() == [[5.0, 0.0], [0.0, 7.0]]


def test_clearing_spares_entry_0_from_padding() -> None:
    dense = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    indices, values = torch.tensor([[2, 0], [0, 1], [0, 0]]), torch.zeros(3, 2)
    clear_at_(dense, SparseGradient(indices, values, 3, count=torch.tensor([1, 2, 0])))
    assert dense.tolist() == [[1.0, 2.0, 0.0], [0.0, 0.0, 6.0], [7.0, 8.0, 9.0]]
    clear_at_(dense, SparseGradient(indices[1:2].expand(3, 2), values, 3))
    assert dense.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 6.0], [0.0, 0.0, 9.0]]
