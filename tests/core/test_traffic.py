import torch

from regtopk.core.traffic import Traffic, all_gather_bytes, all_reduce_bytes


def test_a_ring_all_gather_moves_all_messages_but_one() -> None:
    # worker n forwards all but its successor's, and receives all but its own
    sent, received = all_gather_bytes(torch.tensor([1, 20, 300]))
    assert sent.tolist() == [301, 21, 320] and received.tolist() == [320, 301, 21]
    assert [t.tolist() for t in all_gather_bytes(torch.tensor([[7], [9]]))] == [[[0], [0]], [[0], [0]]]


def test_a_ring_all_reduce_moves_nearly_two_vectors() -> None:
    assert [all_reduce_bytes(4000, n) for n in (1, 2, 4, 8)] == [0, 4000, 6000, 7000]


def test_counts_add_up_separately() -> None:
    total, step = Traffic.zeros(2), Traffic.zeros(2)
    step.payload_bytes.add_(torch.tensor([1, 2]))
    step.num_entries.add_(5)
    total.add_(step).add_(step)
    assert total.state_dict().keys() == {
        "payload_bytes",
        "sent_bytes",
        "received_bytes",
        "dense_bytes",
        "num_entries",
    }
    assert total.payload_bytes.tolist() == [2, 4] and total.num_entries.tolist() == [10, 10]
    assert total.sent_bytes.tolist() == [0, 0]
    assert step.payload_bytes.tolist() == [1, 2]
