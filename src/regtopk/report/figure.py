"""Draws a run's panels with matplotlib."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from regtopk.errors import MissingExtraError
from regtopk.report.style import GRID, INK, Style, styles_of
from regtopk.runs import Panel, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PANEL_INCHES = (4.3, 3.2)
BAR_INCHES = 0.24  # of height for each row of a panel with bars
LEGEND_INCHES = 6.5  # the least width that all labels of a legend fit into
MAX_CIRCLES = 25  # of published points on one curve
STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text: it takes the page's font and can be searched
    "text.color": INK[0],
    "axes.labelcolor": INK[0],
    "axes.edgecolor": GRID[0],
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.axisbelow": True,
    "grid.color": GRID[0],
    "grid.linewidth": 0.7,
    "xtick.color": INK[0],
    "ytick.color": INK[0],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}


def draw_files(panels: Sequence[Panel], records: Sequence[Record], png: Path, svg: Path) -> None:
    """All panels side by side with a legend, as a picture and as a drawing for print."""
    figure = _draw(panels, records, styles_of(methods_of(records)), with_frame=True)
    figure.savefig(png, dpi=160, facecolor="white")
    figure.set_layout_engine("none")  # everything has its place now; finding it takes half of the time
    svg.write_text(_to_svg(figure, salt=panels[0].y), encoding="utf-8")


def draw_inline(panel: Panel, records: Sequence[Record], styles: Mapping[str, Style], *, salt: str) -> str:
    """One panel as an SVG element for a page: no ground, no title, no legend.

    Args:
        panel: what to draw.
        records: of the run.
        styles: of its methods.
        salt: different for every drawing of a page, so that their inner names do not clash.
    """
    drawing = _to_svg(_draw([panel], records, styles, with_frame=False), salt=salt)
    return drawing[drawing.index("<svg") :]


def methods_of(records: Sequence[Record]) -> list[str]:
    """The methods in order of appearance."""
    return list(dict.fromkeys(record["method"] for record in records))


def _draw(
    panels: Sequence[Panel], records: Sequence[Record], styles: Mapping[str, Style], *, with_frame: bool
) -> "Figure":
    matplotlib = _import_matplotlib()
    with matplotlib.rc_context(STYLE):
        width, height = PANEL_INCHES
        height = max(height, BAR_INCHES * len(styles)) if any(p.marks == "bars" for p in panels) else height
        size = (width * len(panels), height)
        if with_frame:
            size = (max(width * len(panels), LEGEND_INCHES), height + 0.35)
        figure: Figure = matplotlib.figure.Figure(figsize=size, layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw_panel(axes, panel, records, styles)
            if with_frame:
                axes.set_title(panel.title)
        if with_frame:
            handles, labels = figure.axes[0].get_legend_handles_labels()
            longest = max(map(len, labels))
            num_columns = max(1, min(len(labels), int(size[0] / (0.075 * longest + 0.6))))
            place = "outside lower center"
            figure.legend(handles, labels, loc=place, ncols=num_columns, frameon=False, fontsize=9)
    return figure


def _draw_panel(axes: "Axes", panel: Panel, records: Sequence[Record], styles: Mapping[str, Style]) -> None:
    shown = [r for r in records if all(r[key] in (value, None) for key, value in panel.where.items())]
    if panel.x_max is not None:
        shown = [record for record in shown if record[panel.x] <= panel.x_max]
    curves = {m: [record for record in shown if record["method"] == m] for m in methods_of(shown)}
    if panel.marks == "bars":
        _draw_bars(axes, panel, curves, styles)
        return
    for method, curve in curves.items():
        _draw_curve(axes, panel, curve, styles[method])
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.margins(x=0.02)
    if panel.log_x:
        axes.set_xscale("log", nonpositive="mask")
    if panel.log_y:
        axes.set_yscale("log")
    axes.set_ylim(bottom=panel.y_min)
    if panel.log_x:
        _label_log_axis(axes.xaxis, *axes.get_xlim())
    if panel.log_y:
        _label_log_axis(axes.yaxis, *axes.get_ylim())


def _draw_curve(axes: "Axes", panel: Panel, curve: Sequence[Record], style: Style) -> None:
    x = [record[panel.x] for record in curve]
    seeds = [_as_list(record[panel.y]) for record in curve]
    y = [median(values) for values in seeds]
    if panel.marks == "stems":
        _draw_stems(axes, panel, x, y, style)
        return
    (line,) = axes.plot(x, y, style.dashes, color=style.light, label=style.label)
    line.set(linewidth=style.width, alpha=style.opacity)
    if len(seeds[0]) > 1:
        low, high = [min(values) for values in seeds], [max(values) for values in seeds]
        axes.fill_between(x, low, high, color=style.light, alpha=0.15, lw=0)
    if panel.dots is not None:
        dotted = [record for record in curve if panel.dots in record]
        dotted = dotted[:: max(1, len(dotted) // MAX_CIRCLES)]
        at = [record[panel.x] for record in dotted], [record[panel.dots] for record in dotted]
        axes.plot(*at, "o", ms=5, mfc="none", mec=style.light, mew=0.9, zorder=3)


def _draw_bars(
    axes: "Axes", panel: Panel, curves: Mapping[str, Sequence[Record]], styles: Mapping[str, Style]
) -> None:
    """One row a method: the median over seeds of its last record, and the range."""
    seeds = {method: _as_list(curve[-1][panel.y]) for method, curve in curves.items()}
    ranked = sorted(seeds, key=lambda method: median(seeds[method]))
    for row, method in enumerate(ranked):
        style, values = styles[method], seeds[method]
        axes.plot([min(values), max(values)], [row, row], color=style.light, lw=2.5, alpha=0.5)
        axes.plot([median(values)], [row], "o", ms=6, color=style.light, mew=0)
    axes.set_yticks(range(len(ranked)), [styles[method].label for method in ranked])
    axes.set_xlabel(panel.x_label)
    if panel.log_x:
        axes.set_xscale("log")


def _draw_stems(axes: "Axes", panel: Panel, x: list[float], y: list[float], style: Style) -> None:
    floor = panel.y_min or 0.0
    taken = [(at, length) for at, length in zip(x, y, strict=True) if length > floor]
    at, lengths = [at for at, _ in taken], [length for _, length in taken]
    axes.vlines(at, floor, lengths, color=style.light, lw=0.9, alpha=0.6)
    axes.plot(at, lengths, "o", ms=4, color=style.light, label=style.label, mew=0)


def _label_log_axis(axis: "Axis", low: float, high: float) -> None:
    """Powers of ten as 10⁻⁶: plain text, which takes the page's font and a third of the time."""
    shown_between = "235" if high / low < 100 else ""

    def label_between(at: float, _: float) -> str:
        return f"{at:.3g}" if f"{at:e}"[0] in shown_between else ""

    axis.set_major_formatter(lambda at, _: _power_of_ten(round(math.log10(at))))
    axis.set_minor_formatter(label_between)


def _power_of_ten(exponent: int) -> str:
    if -2 <= exponent <= 3:
        return f"{10.0**exponent:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _as_list(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def _to_svg(figure: "Figure", *, salt: str) -> str:
    matplotlib = _import_matplotlib()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):  # the same bytes for the same run
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def _import_matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise MissingExtraError(
            "figures need matplotlib: pip install 'regtopk[plots]', then regtopk report DIR"
        ) from error
    return matplotlib
