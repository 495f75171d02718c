import pytest

from regtopk.report.style import GRID, INK, METHODS, SPARE, format_number, label_of, styles_of


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "–"),
        ("10/10", "10/10"),
        (True, "True"),
        (0, "0"),
        (1234567, "1,234,567"),
        (0.0, "0"),
        (37.000000000000014, "37"),
        (0.01234, "0.0123"),
        (-0.5, "-0.5"),
        (1.3456e-9, "1.3e-9"),
        (-2e-16, "-2.0e-16"),
        (123456.0, "1.2e5"),
    ],
)
def test_numbers(number: object, text: str) -> None:
    assert format_number(number) == text


def test_methods_without_a_look_get_one_each() -> None:
    methods = ["topk", *(f"new-{i}" for i in range(3 * len(SPARE)))]
    styles = styles_of(methods)
    assert styles["topk"] == METHODS["topk"]
    assert styles["new-0"].label == "new-0"
    looks = {(style.light, style.dashes) for style in styles.values()}
    assert len(looks) == len(methods)


def test_labels() -> None:
    assert label_of("topk") == "Top-k"
    assert label_of("density") == "density"


def test_light_colours_are_told_apart() -> None:
    # pages turn them into variables by replacing the text, so no two may be equal
    colours = [style.light for style in METHODS.values()] + [light for light, _ in SPARE]
    colours += [INK[0], GRID[0]]
    assert len(set(colours)) == len(colours)
    assert all(colour == colour.lower() for colour in colours)
