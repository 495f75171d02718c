"""Draws one panel of a run: curves, stems, or where each method ended."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from textwrap import fill
from typing import TYPE_CHECKING, Any

from regtopk.lab.report.style import INK, Style, format_number
from regtopk.lab.runs import Panel, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

LABEL_POINTS = 8.5  # size of the names of methods beside their marks
LARGE = 10_000  # numbers from here on are written with powers of ten
LETTERS = 28  # in a line of a method's name beside its mark
MAX_CIRCLES = 25  # published points on one curve
NAMED = "named: "  # marks whose id begins so get the rest of it as their title


def line_of(style: Style) -> dict[str, Any]:
    """A method's line, in the words of matplotlib."""
    dashes = (0, style.dashes or None)
    return {"color": style.light, "lw": style.width, "alpha": style.opacity, "ls": dashes}


def named(style: Style) -> dict[str, Any]:
    """What a mark of a method is known by, and where it lies: grey below all, then wide lines."""
    return {"gid": f"{NAMED}{style.label}", "zorder": 2 if style.is_grey else 3 - style.width / 10}


def curves_of(
    panel: Panel, records: Sequence[Record], styles: Mapping[str, Style]
) -> dict[str, list[Record]]:
    """What the panel shows of each method, in the order of the styles."""
    shown = [record for record in records if _is_shown(record, panel)]
    curves = {method: [record for record in shown if record["method"] == method] for method in styles}
    return {method: curve for method, curve in curves.items() if curve}


def describe(panel: Panel, curves: Mapping[str, Sequence[Record]], styles: Mapping[str, Style]) -> str:
    """The panel in words, for those who cannot see it."""
    ends = {method: median(_per_seed(curve[-1][panel.y])) for method, curve in curves.items()}
    said = "; ".join(f"{styles[method].label}: {format_number(end)}" for method, end in ends.items())
    return f"{panel.y_label} against {panel.x_label}. Where each method ends: {said}."


def draw_panel(
    panel: Panel, curves: Mapping[str, Sequence[Record]], styles: Mapping[str, Style], axes: "Axes"
) -> None:
    """Draw the methods' curves, and their axes."""
    for method, curve in curves.items():
        _draw_curve(axes, panel, curve, styles[method])
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.margins(x=0.02, y=None if panel.mark is None else 0.12)  # with room for a name above the curves
    if panel.log_x:
        axes.set_xscale("log", nonpositive="mask")
        label_log_axis(axes.xaxis, *axes.get_xlim())
    if panel.log_y:
        axes.set_yscale("log")
    axes.set_ylim(bottom=panel.y_min)
    if panel.mark is not None:
        mark_x(axes, panel.mark, panel.mark_label)
    if panel.log_y:
        label_log_axis(axes.yaxis, *axes.get_ylim())


def _is_shown(record: Record, panel: Panel) -> bool:
    """Whether it belongs to the panel, lies within its axes, has a place and a value (not all diverged)."""
    return (
        panel.x in record
        and all(record[name] in (value, None) for name, value in panel.where.items())
        and (panel.x_max is None or record[panel.x] <= panel.x_max)
        and bool(_per_seed(record[panel.y]))
    )


def _draw_curve(axes: "Axes", panel: Panel, curve: Sequence[Record], style: Style) -> None:
    x = [record[panel.x] for record in curve]
    seeds = [_per_seed(record[panel.y]) for record in curve]
    y = [median(values) for values in seeds]
    if panel.marks == "stems":
        floor = panel.y_min or 0.0
        taken = {at: length for at, length in zip(x, y, strict=True) if length > floor}
        axes.vlines([*taken], floor, [*taken.values()], color=style.light, lw=0.9, alpha=0.6)
        axes.plot([*taken], [*taken.values()], "o", ms=4, color=style.light, mew=0)
        return
    axes.plot(x, y, marker="o" if len(x) == 1 else "", **named(style), **line_of(style))
    if any(len(values) > 1 for values in seeds) and not style.is_grey:
        low, high = [min(values) for values in seeds], [max(values) for values in seeds]
        axes.fill_between(x, low, high, color=style.light, alpha=0.15, lw=0)
    if panel.dots is not None:
        dotted = [record for record in curve if panel.dots in record]
        dotted = dotted[:: max(1, len(dotted) // MAX_CIRCLES)]
        at = [record[panel.x] for record in dotted], [record[panel.dots] for record in dotted]
        axes.plot(*at, "o", ms=5, mfc="none", mec=style.light, mew=0.9, zorder=3)


def draw_bars(
    panel: Panel, finals: Mapping[str, Sequence[float]], styles: Mapping[str, Style], axes: "Axes"
) -> None:
    """One row per method, in the order of the table: the mean over seeds and the range."""
    for row, (method, values) in enumerate(finals.items()):
        colour = styles[method].light
        axes.plot([min(values), max(values)], [row, row], color=colour, lw=2.5, alpha=0.5)
        axes.plot([fmean(values)], [row], "o", ms=6, color=colour, mew=0)
    labels = [fill(styles[method].label, LETTERS) for method in finals]
    axes.set_yticks(range(len(finals)), labels, fontsize=LABEL_POINTS)
    axes.set_ylim(len(finals) - 0.3, -0.7)
    axes.set_xlabel(panel.x_label)
    if panel.log_x:
        axes.set_xscale("log")
        label_log_axis(axes.xaxis, *axes.get_xlim())
    elif (low := axes.get_xlim()[0]) > 0:  # small differences look large
        axes.set_xlabel(f"{panel.x_label}\n(the axis begins at {low:.3g})")


def mark_x(axes: "Axes", at: float, label: str) -> None:
    """Draw a dashed line up from a place of the x axis, with its name at the upper end."""
    axes.axvline(at, color=INK[0], lw=1, ls=(0, (4, 3)), zorder=1)
    axes.annotate(
        label, (at, 1), (4, -4), xycoords=("data", "axes fraction"), textcoords="offset points",
        color=INK[0], fontsize=LABEL_POINTS, va="top",
    )  # fmt: skip


def label_log_axis(axis: "Axis", low: float, high: float) -> None:
    """Label powers of ten as 10⁻⁶, in plain text: it takes the page's font and is drawn faster."""
    from matplotlib.ticker import LogLocator, NullLocator

    def label_between(at: float, _: float) -> str:
        mantissa, exponent = f"{at:.0e}".split("e")
        return f"{at:g}" if 0.01 <= at < LARGE else f"{mantissa}·{_power_of_ten(int(exponent))}"

    axis.set_major_formatter(lambda at, _: _power_of_ten(round(math.log10(at))))
    axis.set_minor_formatter(label_between)
    if high / low < 100:
        axis.set_minor_locator(LogLocator(subs=(2, 3, 5) if high < LARGE else (3,)))
    else:
        axis.set_minor_locator(NullLocator())  # ticks without a label are not seen, but take their time


def _power_of_ten(exponent: int) -> str:
    if -2 <= exponent <= 3:
        return f"{10.0**exponent:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _per_seed(value: Any) -> list[float]:
    """The values of the seeds: one where all have the same, none where all diverged."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
