import torch

from regtopk.core.sparse import SparseGradient, clear_at_, take, to_dense


def test_padding_is_ignored_whatever_it_holds() -> None:
    indices = torch.tensor([[1, 4, 10**12], [-5, -5, -5]])
    values = torch.tensor([[2.0, 3.0, torch.nan], [torch.inf] * 3])
    sparse = SparseGradient(indices, values, numel=6, count=torch.tensor([2, 0]))
    assert sparse.counts.tolist() == [2, 0]
    clean_indices, clean_values = sparse.without_padding()
    assert clean_indices.tolist() == [[1, 4, 0], [0, 0, 0]]
    assert clean_values.tolist() == [[2.0, 3.0, 0.0], [0.0, 0.0, 0.0]]


def test_full_rows_have_no_mask() -> None:
    sparse = SparseGradient(torch.tensor([[1, 4], [0, 2]]), torch.ones(2, 2), numel=6)
    assert sparse.is_valid is None and sparse.counts.tolist() == [2, 2]
    assert sparse.without_padding()[1] is sparse.values
    on_a_rank = SparseGradient(torch.tensor([3]), torch.ones(1), numel=6)
    assert on_a_rank.counts.shape == () and int(on_a_rank.counts) == 1


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
