import torch

from regtopk.core.selection import take_at_, take_largest_


def test_what_a_code_loses_stays_in_the_residual() -> None:
    residual, grad = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([1 / 3, 2.0, 0.1])
    sent = take_largest_(residual, grad, 2, code="bfloat16")
    third = torch.tensor(1 / 3).bfloat16().float()
    assert sent.indices.tolist() == [0, 1] and sent.code == "bfloat16" and sent.numel == 3
    assert torch.equal(sent.values, torch.stack([third, torch.tensor(3.0)]))
    assert torch.equal(residual, torch.stack([grad[0] - third, torch.tensor(0.0), grad[2]]))


def test_one_support_serves_all_rows() -> None:
    residual = torch.arange(6.0).reshape(2, 3)
    values = take_at_(residual, torch.ones(2, 3), torch.tensor([0, 2]))
    assert values.tolist() == [[1.0, 3.0], [4.0, 6.0]]
    assert residual.tolist() == [[0.0, 2.0, 0.0], [0.0, 5.0, 0.0]]


def test_without_a_gradient_the_residual_is_taken_as_it_is() -> None:
    residual = torch.tensor([5.0, 6.0])
    assert take_at_(residual, None, torch.tensor([1])).tolist() == [6.0]
    assert residual.tolist() == [5.0, 0.0]
