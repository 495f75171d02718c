import math
from typing import Any

import pytest

from regtopk.core.options import check_choice, check_integer, check_number, counted
from regtopk.errors import ArgumentError


@pytest.mark.parametrize("number", [0.0, 1, 0.5])
def test_numbers_that_keep_their_rule_pass(number: float) -> None:
    check_number("share", number, "in [0, 1]", lambda x: 0 <= x <= 1)


@pytest.mark.parametrize("number", [1.5, math.nan, True, "0.5", None])
def test_numbers_that_break_their_rule_are_refused(number: Any) -> None:
    with pytest.raises(ArgumentError) as refused:
        check_number("share", number, "in [0, 1]", lambda x: 0 <= x <= 1)
    assert str(refused.value) == f"share must be in [0, 1], got {number!r}"


def test_integers() -> None:
    check_integer("seed", -5)
    check_integer("chunk", 1, at_least=1)
    with pytest.raises(ArgumentError, match=r"^seed must be an integer, got True$"):
        check_integer("seed", True)
    with pytest.raises(ArgumentError, match=r"^chunk must be an integer of at least 1, got 0$"):
        check_integer("chunk", 0, at_least=1)


def test_choices() -> None:
    check_choice("how", "slow", ("fast", "slow"))
    with pytest.raises(ArgumentError, match=r"^how must be one of fast, slow, got 'never'$"):
        check_choice("how", "never", ("fast", "slow"))


def test_one_thing_is_singular() -> None:
    assert [counted(n, "seed") for n in (0, 1, 2, 1000)] == ["0 seeds", "1 seed", "2 seeds", "1,000 seeds"]
