"""What options mean, and what every one refuses. Messages name the option, its rule and the value."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from regtopk import ALGORITHMS, EF21, Dense, FairTopK, PosteriorScore, RegTopK, TopK, WarmUp
from regtopk.core import VALUE_CODES
from regtopk.core.options import counted
from regtopk.core.worker import Layout, Worker
from regtopk.errors import ArgumentError
from tests.refusals import refusal

# Each rule by one option that has it, and values that break it. Options whose default is None take None.
RULES: list[tuple[str, str, str, list[Any]]] = [
    ("topk", "density", "in (0, 1]", [0.0, -0.1, 1.5, math.nan, math.inf, "0.1", True, torch.tensor(0.5)]),
    ("topk", "k", "an integer of at least 1", [0, -1, 2.0, "3", True]),
    ("topk", "impute", "in [0, 1]", [-0.1, 1.1, math.nan, math.inf, True, None, "1"]),
    ("scalecom", "beta", "in (0, 1]", [0, 1.5, math.nan, "0.5", True]),
    ("adaptive", "target_error", "in (0, 1)", [0.0, 1.0, math.nan]),
    ("dgc", "momentum", "in [0, 1)", [1.0, -0.1, math.nan, True]),
    ("regtopk", "mu", "in (0, inf)", [0, -1.0, math.nan, math.inf, True, "4"]),
    ("regtopk", "q", "in (-1, inf]", [-1.0, math.nan, -math.inf]),
    ("strom", "tau", "in [1.2e-38, 3.4e38]", [0, -1.0, math.nan, math.inf, "1", True, 1e-50, 1e39]),
    ("sketch", "rows", "an integer of at least 1", [0, None]),
    ("randomk", "seed", "an integer", [1.5, "1", None, True]),
    ("demo", "sign", "True or False", [1, 0, None, "yes"]),
    ("dense", "value_code", f"one of {', '.join(VALUE_CODES)}", ["3bit", None, "none"]),
    ("dgc", "score", "None (magnitude) or a PosteriorScore", [4.0, "regtopk", PosteriorScore]),
    ("regtopk", "damping", "one of factor, cap", ["caps"]),
]


def make(name: str, **options: Any) -> Any:
    kind = ALGORITHMS[name]
    has_k = "k" in {f.name for f in fields(kind)} and not {"density", "k", "threshold"} & set(options)
    return kind(**({"k": 1} if has_k else {}), **options)


@pytest.mark.parametrize(("name", "option", "rule", "values"), RULES)
def test_a_value_that_breaks_the_rule_is_refused(name: str, option: str, rule: str, values: Any) -> None:
    for value in values:
        kind, text = refusal(lambda: make(name, **{option: value}))  # noqa: B023
        message = text.partition(" (did you mean")[0]
        assert (kind, message) == ("ArgumentError", f"{option} must be {rule}, got {value!r}")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_has_a_rule(name: str) -> None:
    for option in {f.name for f in fields(ALGORITHMS[name])} - {"k"}:
        with pytest.raises(ArgumentError, match=f"{option} must .*, got -7"):
            make(name, **{option: -7 if option != "seed" else -7.5})


def tenth(step: int) -> float:
    return 0.1


CAP = "belongs to damping='factor' and must be left out with damping='cap', got"
ALONE = "give threshold alone, or density or k to compute it from, got"
ONE_GOAL = "give at most one of target_error and bytes_per_step, got"
OWN_DENSITY = "algorithm must have a density and not adapt it itself, got"
KEEPS_ALL = "algorithm must keep all that it does not send in its residual, for a target_error to be measured"
NUMBER = "algorithm must have a density that is a number, or a k, got"
ORDER = "min_density must be at most max_density, got"
OWN_CHOICE = "returned is for algorithms whose workers choose for themselves by size alone "
OWN_CHOICE += "(topk, chunked-topk, dgc and ef21, without a score), and must be None for"
SCHEDULED = TopK(density=tenth)
TOGETHER: list[tuple[str, dict[str, Any], str]] = [
    ("regtopk", {"damping": "cap", "q": 1.0}, f"q {CAP} 1.0"),
    ("regtopk", {"damping": "cap", "reference": "current"}, f"reference {CAP} 'current'"),
    ("consensus", {"density": 0.1, "returned": 0.1}, f"{OWN_CHOICE} 'consensus', got 0.1"),
    ("sketch", {"rows": 53}, "rows must be at most 52, got 53"),
    ("demo", {"tile": 65}, "tile must be at most 64, got 65"),
    ("fair-topk", {"trial": 3}, "trial must be even, got 3"),
    ("fair-topk", {"density": tenth}, f"density must be a number, since k is learnt, got {tenth!r}"),
    ("hard-threshold", {"threshold": 1.0, "density": 0.1}, f"{ALONE} threshold=1.0, density=0.1, k=None"),
    ("hard-threshold", {"density": None}, "give exactly one of density and k, got density=None, k=None"),
    ("adaptive", {"target_error": 0.5, "bytes_per_step": 9.0}, f"{ONE_GOAL} 0.5, 9.0"),
    ("adaptive", {"min_density": 0.5, "max_density": 0.1}, f"{ORDER} 0.5 > 0.1"),
    ("adaptive", {"algorithm": Dense()}, f"{OWN_DENSITY} {Dense()}"),
    ("adaptive", {"algorithm": FairTopK(k=1)}, f"{OWN_DENSITY} {FairTopK(k=1)}"),
    ("adaptive", {"algorithm": SCHEDULED}, f"{NUMBER} {SCHEDULED}"),
    ("adaptive", {"algorithm": EF21(k=1)}, f"{KEEPS_ALL} (give bytes_per_step instead), got {EF21(k=1)}"),
]


@pytest.mark.parametrize(("name", "options", "message"), TOGETHER)
def test_options_that_do_not_fit_each_other_are_refused(name: str, options: Any, message: str) -> None:
    assert refusal(lambda: make(name, **options)) == ("ArgumentError", message)


@pytest.mark.parametrize(
    ("option", "value"), [("density", 0.0), ("start", 1.5), ("num_steps", 0), ("num_stages", 2.0)]
)
def test_a_warm_up_that_breaks_its_rule_is_refused(option: str, value: Any) -> None:
    warm_up: Callable[..., WarmUp] = WarmUp
    with pytest.raises(ArgumentError, match=f"{option} must be .*, got {value}"):
        warm_up(**{"density": 0.001, "num_steps": 10, option: value})


def worker(numel: int, step: int = 0) -> Worker:
    return Worker(torch.tensor(1.0), torch.tensor(0), 1, step, Layout.anonymous(numel))


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


def test_a_schedule_is_asked_at_every_step() -> None:
    schedule = TopK(density=lambda step: 1 / (step + 1))
    assert [schedule.num_selected(worker(12, step)) for step in range(4)] == [12, 6, 4, 3]


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
