"""Lays out a run's panels with matplotlib, for files and for a page."""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from regtopk.lab.method import Method
from regtopk.lab.report.panels import LETTERS, NAMED, curves_of, describe, draw_bars, draw_panel, line_of
from regtopk.lab.report.style import GRID, INK, OTHER, Style, format_number, styles_of
from regtopk.lab.runs import Panel, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = (4.3, 3.2)
INLINE_SCALE = 0.85  # panels of a page are drawn smaller and shown larger: their text stays legible
BAR_INCHES = 0.7  # height of the axis below bars
ROW_INCHES, NAME_INCHES = 0.1, 0.14  # height of a row of bars, and of each line of the name beside it
LETTER_INCHES = 0.07  # width of a letter in a method's name
LINE_INCHES = 0.2  # height of a line of the legend
TITLE_INCHES = 0.25  # height of a panel's title
LEGEND_INCHES = 6.5  # the least width of a figure: any one label of the legend fits
STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text: it takes the page's font and can be searched
    "text.parse_math": False,  # a $ in a name is a $
    "axes.grid": True,
    "axes.grid.which": "both",  # every number at a log axis has its line
    "axes.titlesize": 11,
    "axes.axisbelow": True,
    "grid.linewidth": 0.7,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK[0]),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), GRID[0]),
    **{f"{axis}tick.{kind}.size": 0 for axis in "xy" for kind in ("major", "minor")},
}


class Drawing(NamedTuple):
    """One set of axes."""

    title: str
    size: tuple[float, float]  # in inches
    draw: Callable[["Axes"], None]
    about: str = ""  # what it shows, in words

    @property
    def is_tall(self) -> bool:
        """Whether it is higher than a panel of curves."""
        return self.size[1] > PANEL_INCHES[1]


def styles_of_run(run: Run) -> dict[str, Style]:
    """The look of each method that is drawn, in the order of the table.

    At equal bytes, labels say how values are coded, and each method is drawn with its best lr alone.
    """
    config, summary = run.header["config"], run.summary
    rows = [row.get("measure") for row in summary["table"]]
    methods = list(dict.fromkeys(record["method"] for record in run.records))
    methods.sort(key=lambda method: rows.index(method) if method in rows else len(rows))
    if not config.get("like"):
        return styles_of(methods, summary.get("base"))
    if summary.get("metric") == "accuracy":
        # where several differ in lr only, the base or else the best of them
        results = sorted(summary["results"], key=lambda r: (r["method"] == summary.get("base"), r["mean"]))
        drawn = {Method.read(r["method"]).without("lr"): r["method"] for r in results}.values()
        left_out = {r["method"] for r in results}.difference(drawn)
        methods = [method for method in methods if method not in left_out]
    return styles_of(methods, summary.get("base"), config.get("value_code", ""))


def drawings_of(run: Run) -> list[Drawing]:
    """The panels of a run."""
    styles = styles_of_run(run)
    drawings = []
    for panel in run.panels:
        if panel.marks == "bars":
            drawings.append(_bars(run, panel, styles))
            continue
        curves = curves_of(panel, run.records, styles)
        draw = partial(draw_panel, panel, curves, styles)
        drawings.append(Drawing(panel.title, PANEL_INCHES, draw, describe(panel, curves, styles)))
    return drawings


def _bars(run: Run, panel: Panel, styles: Mapping[str, Style]) -> Drawing:
    """Final numbers; the panel grows with the number of methods and of lines of their names."""
    where = panel.where.items()
    there = [r for r in run.summary["results"] if all(r[key] in (at, None) for key, at in where)]
    finals = {r["method"]: r["final"] for r in there}
    shown = {method: finals[method] for method in styles if method in finals}
    num_lines = max(len(wrap(styles[method].label, LETTERS)) for method in shown)
    height = BAR_INCHES + len(shown) * (ROW_INCHES + num_lines * NAME_INCHES)
    size = PANEL_INCHES[0], max(PANEL_INCHES[1], height)
    said = "; ".join(f"{styles[m].label}: {format_number(fmean(values))}" for m, values in shown.items())
    return Drawing(panel.title, size, partial(draw_bars, panel, shown, styles), f"{panel.x_label}: {said}.")


def draw_files(run: Run, png: Path, svg: Path) -> None:
    """Draw all panels with a legend, as PNG and as SVG."""
    drawings = drawings_of(run)
    figure = draw_all(drawings, list(styles_of_run(run).values()))
    save_png(figure, png)
    figure.set_layout_engine("none")  # everything has its place now: laying it out again is slow
    about = " ".join(f"{drawing.title}: {drawing.about}" for drawing in drawings)
    svg.write_text(to_svg(figure, run.header["title"], about, salt=run.panels[0].y), encoding="utf-8")


def save_png(figure: "Figure", path: Path) -> None:
    """Save a picture with 256 colours: a quarter of the bytes, and no difference to see."""
    from PIL import Image  # comes with matplotlib

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, facecolor="white", pil_kwargs={"compress_level": 0})
    picture = Image.open(buffer).convert("RGB")
    picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path)


def draw_inline(drawing: Drawing, *, salt: str) -> str:
    """One panel as an SVG element, without title and legend; `salt` keeps the ids of a page apart."""
    import matplotlib.figure

    width, height = (INLINE_SCALE * inches for inches in drawing.size)
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure((width, height), layout="constrained")
        drawing.draw(figure.subplots())
    text = to_svg(figure, drawing.title, drawing.about, salt=salt)
    return text[text.index("<svg") :]


def draw_all(drawings: Sequence[Drawing], styles: Sequence[Style]) -> "Figure":
    """Rows of panels, and a strip for the legend at the bottom."""
    import matplotlib.figure
    import matplotlib.lines

    num_columns = 2 if len(drawings) == 4 else 3
    rows = [drawings[at : at + num_columns] for at in range(0, len(drawings), num_columns)]
    styles = legend_of(styles)
    width = max(LEGEND_INCHES, *(sum(drawing.size[0] for drawing in row) for row in rows))
    heights = [max(drawing.size[1] for drawing in row) + TITLE_INCHES for row in rows]
    longest = max(len(style.label) for style in styles)
    num_fitting = max(1, min(len(styles), int(width / (LETTER_INCHES * longest + 0.65))))
    num_lines = math.ceil(len(styles) / num_fitting)
    heights.append(LINE_INCHES * num_lines + 0.15)
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure((width, sum(heights)), layout="constrained")
        *strips, last = figure.subfigures(len(heights), 1, height_ratios=heights)
        for strip, row in zip(strips, rows, strict=True):
            for axes, drawing in zip(strip.subplots(1, len(row), squeeze=False)[0], row, strict=True):
                drawing.draw(axes)
                axes.set_title(drawing.title)
        keys = [matplotlib.lines.Line2D([], [], label=style.label, **line_of(style)) for style in styles]
        ncols = math.ceil(len(styles) / num_lines)  # lines of about the same length
        last.legend(handles=keys, loc="center", ncols=ncols, frameon=False, fontsize=9)
    return figure


def legend_of(styles: Sequence[Style]) -> list[Style]:
    """The looks that are told apart, and one for all that are grey."""
    told = [style for style in styles if not style.is_grey]
    num_grey = len(styles) - len(told)
    return [*told, replace(OTHER, label=f"{num_grey} others")] if num_grey else told


def to_svg(figure: "Figure", title: str, about: str, *, salt: str) -> str:
    """The figure, with a label and a description for screen readers, and names under the pointer."""
    import matplotlib

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):  # the same bytes for the same run
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(f'<g id="{NAMED}([^"]*)">', r"<g><title>\1</title>", buffer.getvalue())
    text = text.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
    start = text.index(">", text.index("<svg")) + 1
    return f"{text[:start]}<desc>{escape(about)}</desc>{text[start:]}"
