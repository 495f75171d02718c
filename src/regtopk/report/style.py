"""How methods and numbers look, in tables, figures and pages alike."""

from dataclasses import dataclass, replace


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
SPARE = (
    Style("", "#c2366f", "#ff86b3"),
    Style("", "#0b7f92", "#58cfe2"),
    Style("", "#6f7d12", "#c3d34f"),
    Style("", "#8c5a3c", "#d8a384"),
)

# ink, lines and ground of figures: (on light, on dark)
INK = ("#20242b", "#e6e9ee")
GRID = ("#dfe3e9", "#333a45")


def style_of(method: str) -> Style:
    """The look of a method; one without a look of its own gets a spare one, always the same."""
    if method in METHODS:
        return METHODS[method]
    spare = SPARE[sum(map(ord, method)) % len(SPARE)]
    return replace(spare, label=method)


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
