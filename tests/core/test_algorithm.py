import math
from typing import Any

import numpy as np
import pytest
import torch

from regtopk.algorithms import Dense, RegTopK, TopK
from regtopk.core.options import counted
from regtopk.core.worker import Layout, Worker
from regtopk.errors import ArgumentError


def worker(numel: int, step: int = 0) -> Worker:
    return Worker(torch.tensor(1.0), torch.tensor(0), 1, step, Layout.anonymous(numel))


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, math.nan, math.inf, "0.1", True, torch.tensor(0.5)])
def test_a_density_outside_its_range_is_refused(density: Any) -> None:
    with pytest.raises(ArgumentError) as refused:
        TopK(density=density)
    assert str(refused.value) == f"density must be in (0, 1], got {density!r}"


@pytest.mark.parametrize("k", [0, -1, 2.0, "3", True])
def test_a_k_that_is_no_count_is_refused(k: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^k must be an integer of at least 1, got {k!r}$"):
        TopK(k=k)


@pytest.mark.parametrize(("density", "k"), [(None, None), (0.1, 3)])
def test_density_and_k_exclude_each_other_and_have_names(density: float | None, k: int | None) -> None:
    message = f"^give exactly one of density and k, got density={density}, k={k}$"
    with pytest.raises(ArgumentError, match=message):
        TopK(density=density, k=k)
    with pytest.raises(TypeError):
        TopK(0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("density", "numel", "k"),
    [
        (1.0, 7, 7),
        (1, 7, 7),
        (0.001, 7, 1),
        (1e-300, 10**9, 1),
        (0.29, 100, 29),  # 0.29 · 100 is 28.999999999999996
        (0.5, 5, 2),  # round to even
        (0.5, 7, 4),
        (0.6, 100, 60),
        (np.float64(0.25), 8, 2),
    ],
)
def test_k_is_the_rounded_share_and_at_least_one(density: float, numel: int, k: int) -> None:
    assert TopK(density=density).num_selected(worker(numel)) == k


def test_a_given_k_is_k() -> None:
    assert TopK(k=3).num_selected(worker(3)) == 3
    with pytest.raises(ArgumentError, match="k must be at most the number of entries, J = 2, got 3"):
        TopK(k=3).num_selected(worker(2))


def test_a_schedule_is_asked_at_every_step() -> None:
    schedule = TopK(density=lambda step: 1 / (step + 1))
    assert [schedule.num_selected(worker(12, step)) for step in range(4)] == [12, 6, 4, 3]
    with pytest.raises(ArgumentError, match=r"density must be in \(0, 1\], got nan"):
        TopK(density=lambda step: math.nan).num_selected(worker(12))


def test_options_are_plain_and_name_functions() -> None:
    def quarter(step: int) -> float:
        return 0.25

    assert Dense().options() == {"value_code": "float32", "sum_code": "float32"}
    assert RegTopK(density=quarter).options() == {
        "density": f"{__name__}.test_options_are_plain_and_name_functions.<locals>.quarter",
        "k": None,
        "value_code": "float32",
        "returned": None,
        "mu": 4.0,
        "damping": "factor",
        "reference": "previous",
        "q": "inf",
        "impute": 0.0,
    }


def test_one_thing_is_singular() -> None:
    assert [counted(n, "seed") for n in (0, 1, 2, 1000)] == ["0 seeds", "1 seed", "2 seeds", "1,000 seeds"]
