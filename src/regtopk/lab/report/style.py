"""How methods and numbers look, in tables, figures and pages alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regtopk.lab.method import Method


@dataclass(frozen=True)
class Style:
    """A method's look: its label, its colour on light and on dark ground, and its line."""

    label: str  # what the method is called in print
    light: str
    dark: str
    dashes: tuple[float, ...] = ()  # lengths of strokes and gaps, in line widths; none is a solid line
    width: float = 1.3  # of the line, in points
    opacity: float = 1.0

    @property
    def is_grey(self) -> bool:
        """Whether this is one of many."""
        return self.light == OTHER.light

    @property
    def variable(self) -> str:
        """What its colour is called on a page."""
        return f"c{self.light[1:]}"


DOTS, DASH_DOT = (1.0, 1.65), (6.4, 1.6, 1.0, 1.6)
DASHES = ((), (3.7, 1.6), DASH_DOT, DOTS, (8.0, 2.0), (3.7, 1.6, 1.0, 1.6, 1.0, 1.6))

# those that every comparison is read by are thick, and wide ones lie under the others: none hides another
METHODS = {
    "dense": Style("dense", "#5b6472", "#a3adba", width=4.5, opacity=0.45),
    "topk": Style("Top-k", "#d4500f", "#ff9a62", width=3.0),
    "regtopk": Style("RegTop-k", "#1f5fd6", "#7fb0ff", width=1.9),
    "regtopk-cap": Style("RegTop-k, cap", "#9c1f58", "#ff5fa2", (3.7, 1.6), width=1.6),
    "regtopk-current": Style("RegTop-k, current", "#8a4fd0", "#c39bff", DASH_DOT, width=1.6),
    "global-topk": Style("global Top-k (oracle)", "#0d8a63", "#4fd6a6", DOTS, width=2.6),
    "randomk": Style("Random-k", "#a8790a", "#e8bd4f"),
}
MAX_COLOURS = 8  # of more methods, FEW have a colour: what all are read by, the base and the best
FEW = 6
READ_BY = ("dense", "topk", "regtopk")
OTHER = Style("", "#aeb6c2", "#5a6472", width=0.9)
SPARE = (  # for methods without a look of their own: (on light, on dark)
    ("#c2366f", "#ff86b3"), ("#0b7f92", "#58cfe2"), ("#6f7d12", "#c3d34f"), ("#8c5a3c", "#d8a384"),
    ("#4a3fb5", "#a9a1ff"), ("#2f8f2f", "#7fdc7f"), ("#b02a2a", "#ff8d8d"), ("#a13fb0", "#e59af0"),
    ("#3d6a8f", "#93bfe2"), ("#7a6f00", "#d6c940"),
)  # fmt: skip
# options whose value says enough
SELF_EXPLAINING = ("value_code", "index_code", "reference", "exchange", "outer", "optimizer")
INK, GRID = ("#20242b", "#e6e9ee"), ("#dfe3e9", "#333a45")  # on light, on dark


def styles_of(methods: Sequence[str], base: str | None = None, value_code: str = "") -> dict[str, Style]:
    """Each method's look: one colour for all variants of an algorithm, which differ by their dashes.

    Of many methods, the best first, all but a few and the base are grey. Labels tell the value code if one is
    given, for methods whose words do not.
    """
    families: dict[str, list[str]] = {}
    for method in sorted(_coloured(methods, base), key=lambda each: (each != base, each not in METHODS)):
        families.setdefault(Method.read(method).algorithm, []).append(method)
    looks, spare = {}, iter(SPARE)
    for name, family in families.items():
        for number, method in enumerate(family):
            nth = number % len(DASHES)
            if number == 0 and name in METHODS:
                first = METHODS[name]
            elif nth == 0:
                first = Style("", *next(spare))
            others = [dashes for dashes in DASHES if dashes != first.dashes]
            looks[method] = first if nth == 0 else Style("", first.light, first.dark, others[nth - 1])
    styles = {}
    for method in methods:
        is_open = value_code and "value_code" not in Method.read(method).options
        label = label_of(f"{method}:value_code={value_code}" if is_open else method)
        label = f"{label} (base)" if method == base else label
        styles[method] = replace(looks.get(method, OTHER), label=label)
    return styles


def _coloured(methods: Sequence[str], base: str | None) -> list[str]:
    """All methods; of many, the first of those that all are read by, the base and the best."""
    if len(methods) <= MAX_COLOURS:
        return list(methods)
    algorithms = [Method.read(method).algorithm for method in methods]
    first = [methods[algorithms.index(name)] for name in READ_BY if name in algorithms]
    preferred = [*first, *(method for method in methods if method == base), *methods]
    chosen = list(dict.fromkeys(preferred))[:FEW]
    return [method for method in methods if method in chosen]


def label_of(text: str) -> str:
    """What a method is called in print, shortly; anything else is called what it is."""
    method = Method.read(text)
    words = [METHODS[method.algorithm].label if method.algorithm in METHODS else method.algorithm]
    for key, value in method.words:
        if key == "density":
            words.append("|".join(f"{100 * float(each):g} %" for each in value.split("|")))
        else:
            words.append(value if key in SELF_EXPLAINING else f"{key}={value}")
    return ", ".join(words)


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of a table that say something, in the order in which they first appear."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if any(row.get(key) is not None for row in rows)]


def format_number(number: object, column: str = "") -> str:
    """A number for a table: three digits (losses: four) or 1.3e-9; a dash for nothing."""
    if number is None:
        return "–"
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return str(number)
    if isinstance(number, int):
        return f"{number:,}"
    if number == 0 or 1e-3 <= abs(number) < 1e4:
        return f"{number:.{4 if column == 'test_loss' else 3}g}"
    mantissa, _, exponent = f"{number:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
