"""Lays out a run's panels with matplotlib, for files and for a page."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regtopk.errors import MissingExtraError
from regtopk.report.frontier import TITLE, best_lr_of, draw_frontier, frontier_inches, frontier_of
from regtopk.report.panels import draw_panel, line_of, methods_of
from regtopk.report.style import GRID, INK, Style, styles_of
from regtopk.runs import Panel, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_INCHES = (4.3, 3.2)
INLINE_SCALE = 0.85  # panels of a page are drawn smaller and shown larger: their text stays legible
BAR_INCHES = 0.24  # height of a row in a panel with bars
LETTER_INCHES = 0.07  # width of a letter in a method's name
LINE_INCHES = 0.2  # height of a line of the legend
TITLE_INCHES = 0.25  # height of a panel's title
LEGEND_INCHES = 6.5  # the least width of a figure: any one label of the legend fits
STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    "svg.fonttype": "none",  # text stays text: it takes the page's font and can be searched
    "text.parse_math": False,  # a $ in a name is a $
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


class Drawing(NamedTuple):
    """One set of axes: its title, its size in inches, how it is drawn, and whether it has a row to itself."""

    title: str
    size: tuple[float, float]
    draw: Callable[["Axes"], None]
    is_wide: bool = False


def styles_of_run(run: Run) -> dict[str, Style]:
    """The look of each method that is drawn; at equal bytes labels say how values are coded."""
    config = run.header["config"]
    value_code = config.get("value_code", "") if config.get("like") else ""
    return styles_of(_drawn_methods(run), run.summary.get("base"), value_code)


def _drawn_methods(run: Run) -> list[str]:
    """All methods; at equal bytes, where there are many, each with its best lr only."""
    methods = methods_of(run.records)
    if not run.header["config"].get("like") or run.summary.get("metric") != "accuracy":
        return methods
    left_out = {r["method"] for r in run.summary["results"]} - best_lr_of(run)
    return [method for method in methods if method not in left_out]


def drawings_of(run: Run) -> list[Drawing]:
    """The panels of a run and, where bytes were measured, accuracy against bytes."""
    styles = styles_of_run(run)
    records = [record for record in run.records if record["method"] in styles]
    drawings = [
        Drawing(panel.title, _panel_inches(panel, styles), partial(draw_panel, panel, records, styles))
        for panel in run.panels
    ]
    frontier = frontier_of(run)
    if frontier is not None:
        size = frontier_inches(frontier)
        draw = partial(draw_frontier, frontier, styles)
        drawings.append(Drawing(TITLE, size, draw, is_wide=True))
    return drawings


def _panel_inches(panel: Panel, styles: Mapping[str, Style]) -> tuple[float, float]:
    """A panel with bars grows with the number and the length of the methods' names beside them."""
    width, height = PANEL_INCHES
    if panel.marks != "bars":
        return width, height
    longest = max(len(style.label) for style in styles.values())
    return width + max(0.0, LETTER_INCHES * longest - 0.9), max(height, BAR_INCHES * len(styles) + 0.7)


def draw_files(run: Run, png: Path, svg: Path) -> None:
    """Draw all panels with a legend, as PNG and as SVG."""
    figure = draw_all(drawings_of(run), list(styles_of_run(run).values()))
    save_png(figure, png)
    figure.set_layout_engine("none")  # everything has its place now: laying it out again is slow
    svg.write_text(_to_svg(figure, salt=run.panels[0].y), encoding="utf-8")


def save_png(figure: "Figure", path: Path) -> None:
    """Save a picture with 256 colours: a quarter of the bytes, and no difference to see."""
    from PIL import Image  # comes with matplotlib

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, facecolor="white", pil_kwargs={"compress_level": 0})
    picture = Image.open(buffer).convert("RGB")
    picture.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path)


def draw_inline(drawing: Drawing, *, salt: str) -> str:
    """One panel as an SVG element for a page, without background, title and legend.

    Args:
        drawing: what to draw.
        salt: different for every drawing of a page, so that their ids do not clash.
    """
    matplotlib = _import_matplotlib()
    width, height = drawing.size
    scale = 1.0 if drawing.is_wide else INLINE_SCALE
    with matplotlib.rc_context(STYLE):
        figure: Figure = matplotlib.figure.Figure((scale * width, scale * height), layout="constrained")
        drawing.draw(figure.subplots())
    text = _to_svg(figure, salt=salt)
    return text[text.index("<svg") :]


def draw_all(drawings: Sequence[Drawing], styles: Sequence[Style]) -> "Figure":
    """Rows of panels, the wide ones below them, and a strip for the legend at the bottom."""
    matplotlib = _import_matplotlib()
    rows = _rows(drawings)
    width = max(LEGEND_INCHES, *(sum(drawing.size[0] for drawing in row) for row in rows))
    heights = [max(drawing.size[1] for drawing in row) + TITLE_INCHES for row in rows]
    longest = max(len(style.label) for style in styles)
    num_columns = max(1, min(len(styles), int(width / (LETTER_INCHES * longest + 0.65))))
    heights.append(LINE_INCHES * math.ceil(len(styles) / num_columns) + 0.15)
    with matplotlib.rc_context(STYLE):
        figure: Figure = matplotlib.figure.Figure((width, sum(heights)), layout="constrained")
        *strips, last = figure.subfigures(len(heights), 1, height_ratios=heights)
        for strip, row in zip(strips, rows, strict=True):
            for axes, drawing in zip(strip.subplots(1, len(row), squeeze=False)[0], row, strict=True):
                drawing.draw(axes)
                axes.set_title(drawing.title)
        keys = [matplotlib.lines.Line2D([], [], label=style.label, **line_of(style)) for style in styles]
        last.legend(handles=keys, loc="center", ncols=num_columns, frameon=False, fontsize=9)
    return figure


def _rows(drawings: Sequence[Drawing]) -> list[list[Drawing]]:
    narrow = [drawing for drawing in drawings if not drawing.is_wide]
    num_columns = 2 if len(narrow) == 4 else 3
    rows = [narrow[at : at + num_columns] for at in range(0, len(narrow), num_columns)]
    return rows + [[drawing] for drawing in drawings if drawing.is_wide]


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
        import matplotlib.lines
    except ImportError as error:
        raise MissingExtraError(
            "figures need matplotlib: pip install 'regtopk[plots]', then regtopk report DIR"
        ) from error
    return matplotlib
