from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from regtopk.core.state import State, accumulation_dtype, per_worker, shared
from regtopk.errors import StateError


@dataclass
class Example(State):
    residual: Tensor = per_worker("weighted_sum")
    indices: Tensor = per_worker("reset")
    mean: Tensor = shared()


def example(fill: float = 1.0, k: int = 2) -> Example:
    return Example(torch.full((3, 4), fill), torch.full((3, k), int(fill)), torch.full((4,), fill))


def test_rules_are_read_from_the_fields() -> None:
    assert Example.rules() == {"residual": "weighted_sum", "indices": "reset", "mean": "shared"}


def test_loading_copies_and_keeps_the_dtype() -> None:
    source, target = example(1.0, k=5), example(2.0)
    target.load_state_dict({name: tensor.double() for name, tensor in source.state_dict().items()})
    source.residual.zero_()
    assert target.residual.unique().tolist() == [1.0]
    assert target.indices.shape == (3, 5)  # the size of a selection may differ
    assert (target.residual.dtype, target.indices.dtype) == (torch.float32, torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(1)}, "state must have the fields ['indices', 'mean', 'residual'], got ['a', "),
        ({"residual": torch.zeros(3, 5)}, "state field 'residual' must have shape (3, 4), got (3, 5)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_as_a_whole(change: dict[str, Tensor], message: str) -> None:
    target = example(2.0)
    with pytest.raises(StateError) as refused:
        target.load_state_dict({**example(1.0).state_dict(), **change})
    assert str(refused.value).startswith(message)
    assert all(tensor.unique().tolist() == [2.0] for tensor in target.state_dict().values())


def test_sums_are_kept_in_at_least_float32() -> None:
    dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float64
    kept = [accumulation_dtype(dtype) for dtype in dtypes]
    assert kept == [torch.float32, torch.float32, torch.float32, torch.float64]
