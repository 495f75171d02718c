from pathlib import Path

import pytest
import torch
from torch import nn

from regtopk.errors import ArgumentError
from regtopk.lab.plan.workload import Workload, load_model, measure_step, parse_shape

MODULE = """
import torch
from torch import nn


def network():
    return nn.Linear(3, 2)


def with_inputs():
    return nn.Linear(3, 2), torch.randn(5, 3)


def frozen():
    return network().requires_grad_(False)


def broken():
    raise RuntimeError("no weights here")


class Zoo:
    @staticmethod
    def network():
        return nn.Linear(7, 1)


number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that only the working directory has."""
    name = f"zoo_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # undone afterwards, with what load_model adds
    return name


def test_a_size_alone_is_square_matrices() -> None:
    workload = Workload.of_size(2 * 1024**2 + 3 * 1024 + 5)
    assert workload.numel == 2 * 1024**2 + 3 * 1024 + 5
    assert workload.shapes == ((1024, 1024), (1024, 1024), (1024, 3), (5,))
    assert Workload.of_size(7).shapes == ((7,),)
    assert Workload(((8, 3, 5, 5), (8,))).numel == 608


def test_a_model_from_the_working_directory(module: str) -> None:
    model, inputs = load_model(f"{module}:network")
    assert Workload.of_model(model).shapes == ((2, 3), (2,)) and inputs is None
    model, inputs = load_model(f"{module}:with_inputs")
    assert inputs is not None and inputs[0].shape == (5, 3)
    assert measure_step(model, inputs, "cpu") > 0
    assert Workload.of_model(load_model(f"{module}:Zoo.network")[0]).numel == 8


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere", "model must be pkg.module:callable, got 'nowhere'"),
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("{}:missing", "AttributeError: module '.*' has no attribute 'missing'"),
        ("{}:broken", "RuntimeError: no weights here"),
        ("{}:number", "TypeError: 'int' object is not callable"),
        ("builtins:dict", "model must return a torch.nn.Module, or one and its inputs, got dict from"),
    ],
)
def test_a_model_that_cannot_be_had(module: str, spec: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        load_model(spec.format(module))


def test_a_model_without_gradients(module: str) -> None:
    with pytest.raises(ArgumentError, match="model must have parameters that require a gradient, got none"):
        Workload.of_model(load_model(f"{module}:frozen")[0])


def test_a_model_that_does_not_run() -> None:
    message = r"model must run forward and backward on its inputs, but with \[\(1, 4\)\] it failed with"
    with pytest.raises(ArgumentError, match=message):
        measure_step(nn.Linear(3, 2), (torch.randn(1, 4),), "cpu")


def test_outputs_of_many_kinds() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            return {"out": [x * self.w]}

    assert measure_step(Several(), (torch.ones(2),), "cpu") > 0


def test_shapes() -> None:
    assert parse_shape("20,3,32,32") == parse_shape("20x3x32x32") == (20, 3, 32, 32)
    for text in ("big", "", "3,0"):
        with pytest.raises(ArgumentError, match="input shape must be whole numbers of at least 1"):
            parse_shape(text)
