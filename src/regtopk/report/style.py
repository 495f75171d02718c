"""How methods and numbers look, in tables, figures and pages alike."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """A method's look: its label, its colour on light and on dark ground, and its line."""

    label: str
    light: str
    dark: str
    dashes: str = "-"
    width: float = 1.6
    opacity: float = 1.0


METHODS = {
    "dense": Style("dense", "#5b6472", "#a3adba", width=4.5, opacity=0.45),
    "topk": Style("Top-k", "#d4500f", "#ff9a62"),
    "regtopk": Style("RegTop-k", "#1f5fd6", "#7fb0ff"),
    "regtopk-current": Style("RegTop-k, current", "#8a4fd0", "#c39bff", "-."),
    "global-topk": Style("global Top-k (oracle)", "#0d8a63", "#4fd6a6", ":"),
    "randomk": Style("Random-k", "#a8790a", "#e8bd4f"),
}
# for methods without a look of their own: (on light, on dark)
SPARE = (
    ("#c2366f", "#ff86b3"),
    ("#0b7f92", "#58cfe2"),
    ("#6f7d12", "#c3d34f"),
    ("#8c5a3c", "#d8a384"),
    ("#4a3fb5", "#a9a1ff"),
    ("#2f8f2f", "#7fdc7f"),
    ("#b02a2a", "#ff8d8d"),
    ("#a13fb0", "#e59af0"),
    ("#3d6a8f", "#93bfe2"),
    ("#7a6f00", "#d6c940"),
)
SPARE_DASHES = ("-", "--", "-.", ":")

# ink, lines and ground of figures: (on light, on dark)
INK = ("#20242b", "#e6e9ee")
GRID = ("#dfe3e9", "#333a45")


def styles_of(methods: Sequence[str]) -> dict[str, Style]:
    """Each method's look; those without one of their own get spare colours in turn, then other dashes."""
    styles, num_spare = {}, 0
    for method in methods:
        if method in METHODS:
            styles[method] = METHODS[method]
            continue
        light, dark = SPARE[num_spare % len(SPARE)]
        dashes = SPARE_DASHES[num_spare // len(SPARE) % len(SPARE_DASHES)]
        styles[method] = Style(method, light, dark, dashes)
        num_spare += 1
    return styles


def label_of(name: str) -> str:
    """What a method is called in print; anything else is called what it is."""
    return METHODS[name].label if name in METHODS else name


def format_number(number: object) -> str:
    """A number for a table: three digits, 1.3e-9 where that is shorter; a dash for nothing."""
    if number is None:
        return "–"
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return str(number)
    if isinstance(number, int):
        return f"{number:,}"
    if number == 0 or 1e-3 <= abs(number) < 1e4:
        return f"{number:.3g}"
    mantissa, _, exponent = f"{number:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
