"""Densities that fall during the first steps."""

from itertools import pairwise
from typing import Any

import pytest

from regtopk import TopK, WarmUp
from regtopk.errors import ArgumentError


def test_falls_in_equal_factors_as_in_deep_gradient_compression() -> None:
    schedule = WarmUp(density=0.001, num_steps=400)
    stages = [schedule(step) for step in (0, 100, 200, 300, 400, 10_000)]
    # 0.25 · (0.001 / 0.25)^(i / 4), the paper's "25 %, 6.25 %, 1.5625 %, 0.4 %, 0.1 %" to a digit
    assert stages == pytest.approx([0.25, 0.0629, 0.0158, 0.00398, 0.001, 0.001], rel=1e-2)
    assert schedule(99) == schedule(0) and schedule(399) == schedule(300)
    assert stages[-2] == stages[-1] == 0.001


def test_as_many_stages_as_steps_is_an_exponential() -> None:
    schedule = WarmUp(density=0.01, num_steps=50, start=1.0, num_stages=50)
    densities = [schedule(step) for step in range(51)]
    assert densities[0] == 1.0 and densities[-1] == 0.01
    factors = [after / before for before, after in pairwise(densities)]
    assert factors == pytest.approx([0.01 ** (1 / 50)] * 50)


def test_ranks_can_compare_it() -> None:
    options = TopK(density=WarmUp(density=0.001, num_steps=400)).options()
    assert options["density"] == "WarmUp(density=0.001, num_steps=400, start=0.25, num_stages=4)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"start": 1.5}, r"start must be in \(0, 1\], got 1.5"),
        ({"num_steps": 0}, "num_steps must be an integer of at least 1, got 0"),
        ({"num_stages": 2.5}, "num_stages must be an integer of at least 1, got 2.5"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        WarmUp(**{"density": 0.001, "num_steps": 400, **options})
