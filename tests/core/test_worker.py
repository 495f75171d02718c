"""Layouts, weights, and what a worker keeps."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk.core.state import State, accumulation_dtype, per_worker, shared
from regtopk.core.worker import Layer, Layout, check_weights
from regtopk.errors import ArgumentError
from tests.refusals import refusal


def test_a_layout_of_shapes_has_no_gaps() -> None:
    layout = Layout.of_shapes([("conv", (2, 3), "conv"), ("scale", (), "other"), ("bias", (4,), "bias")])
    assert [(layer.start, layer.numel) for layer in layout.layers] == [(0, 6), (6, 1), (7, 4)]
    assert layout.numel == 11


def test_a_gap_is_refused() -> None:
    with pytest.raises(ArgumentError, match="layout must be without gaps: layer 'b' must start at 2, got 3"):
        Layout((Layer("a", (2,), 0), Layer("b", (2,), 3)))


def test_weights_are_uniform_unless_given() -> None:
    assert check_weights(None, 4).tolist() == [0.25] * 4
    given = torch.tensor([0.5, 0.5, 0.0], requires_grad=True)
    weights = check_weights(given, 3)
    assert weights.tolist() == [0.5, 0.5, 0.0] and weights.dtype == torch.float64
    assert not weights.requires_grad
    assert check_weights([1, 0], 2).tolist() == [1.0, 0.0]


def test_a_sum_within_1e6_is_taken_as_it_is() -> None:
    for weight in (0.5 + 9e-7, 0.5 - 9e-7):
        assert check_weights([0.5, weight], 2).tolist() == [0.5, weight]
    for weight in (0.5 + 1.1e-6, 0.5 - 1.1e-6):
        with pytest.raises(ArgumentError, match="weights must sum to 1"):
            check_weights([0.5, weight], 2)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.6], "weights must sum to 1 within 1e-6, got a sum of 1.1"),
        ([0.0, 0.0], "weights must sum to 1 within 1e-6, got a sum of 0.0"),
        ([1.5, -0.5], "weights must be finite and >= 0, got -0.5 for worker 1"),
        ([math.nan, 1.0], "weights must be finite and >= 0, got nan for worker 0"),
        ([0.0, math.inf], "weights must be finite and >= 0, got inf for worker 1"),
        ([[0.5], [0.5]], "weights must be one number for each of the 2 workers, got shape (2, 1)"),
        (1.0, "weights must be one number for each of the 2 workers, got shape ()"),
    ],
)
def test_weights_that_break_a_rule_are_refused(weights: Any, message: str) -> None:
    assert refusal(lambda: check_weights(weights, 2)) == ("ArgumentError", message)


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
    kind, text = refusal(lambda: target.load_state_dict({**example(1.0).state_dict(), **change}))
    assert kind == "StateError" and text.startswith(message)
    assert all(tensor.unique().tolist() == [2.0] for tensor in target.state_dict().values())


def test_sums_are_kept_in_at_least_float32() -> None:
    dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float64
    kept = [accumulation_dtype(dtype) for dtype in dtypes]
    assert kept == [torch.float32, torch.float32, torch.float32, torch.float64]
