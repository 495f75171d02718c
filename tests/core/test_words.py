from regtopk.core.words import counted


def test_one_thing_is_singular() -> None:
    assert [counted(n, "seed") for n in (0, 1, 2, 1000)] == ["0 seeds", "1 seed", "2 seeds", "1,000 seeds"]
