from dataclasses import replace

from regtopk.lab.report import style as looks
from regtopk.lab.report.style import MAX_COLOURS, METHODS, OTHER, format_number, label_of, styles_of


def test_numbers() -> None:
    texts = {None: "–", "10/10": "10/10", 0: "0", 1234567: "1,234,567", 37.000000000000014: "37"}
    texts |= {0.01234: "0.0123", -0.5: "-0.5", 1.3456e-9: "1.3e-9", -2e-16: "-2.0e-16", 123456.0: "1.2e5"}
    assert {number: format_number(number) for number in texts} == texts
    assert (format_number(True), format_number(0.0)) == ("True", "0")
    assert format_number(1.00512, "test_loss") == "1.005"


def test_methods_without_a_look_get_one_each() -> None:
    methods = ["topk", *(f"new-{i}" for i in range(MAX_COLOURS - 1))]
    styles = styles_of(methods)
    assert styles["topk"] == METHODS["topk"]
    assert styles["new-0"].label == "new-0"
    assert len({(style.light, style.dashes) for style in styles.values()}) == len(methods)


def test_of_many_methods_a_few_have_colours() -> None:
    methods = [*(f"new-{i}" for i in range(20)), "regtopk:mu=1", "regtopk", "my-base", "dense", "topk"]
    styles = styles_of(methods, base="my-base")
    told = [method for method in methods if styles[method].light != OTHER.light]
    assert told == ["new-0", "new-1", "regtopk:mu=1", "my-base", "dense", "topk"]  # best, and to read by
    assert styles["new-9"] == replace(OTHER, label="new-9")
    assert styles_of(methods[: MAX_COLOURS + 1])["new-8"] == replace(OTHER, label="new-8")


def test_variants_share_a_colour() -> None:
    methods = ["dense", "topk:value_code=2bit", "topk", "regtopk:mu=5", "regtopk:mu=1", "dgc", "dgc:lr=0.1"]
    styles = styles_of(methods, base="topk")
    assert list(styles) == methods
    assert styles["topk"] == replace(METHODS["topk"], label="Top-k (base)")
    assert styles["regtopk:mu=5"] == replace(METHODS["regtopk"], label="RegTop-k, mu=5")
    pairs = ("topk", "topk:value_code=2bit"), ("regtopk:mu=5", "regtopk:mu=1"), ("dgc", "dgc:lr=0.1")
    for one, other in pairs:
        assert styles[one].light == styles[other].light and styles[one].dashes != styles[other].dashes
    assert len({styles[method].light for method in ("dense", "topk", "regtopk:mu=5", "dgc")}) == 4


def test_many_variants_of_one_algorithm_differ() -> None:
    styles = styles_of([f"global-topk:density=0.{number}" for number in range(1, MAX_COLOURS + 1)])
    assert len({(style.light, style.dashes) for style in styles.values()}) == MAX_COLOURS


def test_labels() -> None:
    assert label_of("topk:density=0.01:index_code=raw32:value_code=4bit") == "Top-k, 1 %, raw32, 4bit"
    assert label_of("regtopk:mu=1:reference=current") == "RegTop-k, mu=1, current"
    assert label_of("topk:exchange=updates:every=2") == "Top-k, updates, every=2"
    assert label_of("density") == "density"
    styles = styles_of(["topk", "topk:value_code=int8"], "topk", "4bit")
    assert [style.label for style in styles.values()] == ["Top-k, 4bit (base)", "Top-k, int8"]


def test_light_colours_are_told_apart() -> None:
    # pages turn them into variables by replacing the text, so no two may be equal
    colours = [style.light for style in METHODS.values()] + [light for light, _ in looks.SPARE]
    colours += [looks.INK[0], looks.GRID[0], OTHER.light]
    assert len(set(colours)) == len(colours)
    assert all(colour == colour.lower() for colour in colours)
