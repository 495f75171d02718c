import pytest

from regtopk.core.options import check_choice, counted
from regtopk.errors import ArgumentError


def test_choices() -> None:
    check_choice("how", "slow", ("fast", "slow"))
    with pytest.raises(ArgumentError, match=r"^how must be one of fast, slow, got 'never'$"):
        check_choice("how", "never", ("fast", "slow"))


def test_one_thing_is_singular() -> None:
    assert [counted(n, "seed") for n in (0, 1, 2, 1000)] == ["0 seeds", "1 seed", "2 seeds", "1,000 seeds"]
