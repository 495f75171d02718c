"""Draw the loss of recorded GPTs against the bytes that a worker receives.

There is a panel for each number of workers, and one more where workers read different text.

``python -m tools.frontier FOLDER ... PICTURE``, where PICTURE is an SVG, for light and dark pages, or a PNG.

Methods of one kind have one colour, and a line joins those of them that no other of the kind beats in bytes
and loss. Of a method that several folders have, the first counts. The dashed line is a ring all_reduce of all
gradients in bfloat16. What ends above the panel stands at its upper edge, with its loss.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regtopk.lab.method import Method
from regtopk.lab.report.figure import STYLE, save_png, to_svg
from regtopk.lab.report.panels import LABEL_POINTS, line_of, mark_x, named
from regtopk.lab.report.style import DASHES, GRID, INK, METHODS, OTHER, SPARE, Style
from regtopk.lab.runs.reading import read_header, read_records
from tools.records import Row, received_bytes, rows_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

TITLE = "Test loss against bytes received per worker and step"
PANEL_INCHES = (5.4, 4.4)
HIGHEST = 1.075  # of the lowest loss: where the panels end
SAME = 1.1  # bytes that differ by less are about the same
ALIKE = ("task", "num_steps", "num_layers", "width", "context", "text_sha256")  # within a panel
PEERS = {"sparseloco": "SparseLoCo", "demo": "DeMo", "ef21": "EF21", "powersgd": "PowerSGD"}
OURS = "ours"
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
MARKERS = "osD^vPX"  # one for each kind that has a colour
PLACES = [  # of a label around its mark, in points
    *((10, 0), (-10, 0), (0, 12), (0, -12), (10, 10), (-10, 10), (10, -10), (-10, -10)),
    *((x, y) for y in (16, -16, 28, -28, 40, -40) for x in (0, 10, -10)),
]

BESIDE = [(4, 9), (4, -9), (170, 9), (170, -9)]  # dense's line, from its left end


class Point(NamedTuple):
    """A method: its bytes; mean, lowest and highest loss of its seeds."""

    num_bytes: float
    mean: float
    low: float
    high: float


class Panel(NamedTuple):
    """What is drawn of runs that differ in their methods alone."""

    title: str
    dense: dict[str, float]  # losses, by optimizer
    kinds: dict[str, list[Point]]
    ring_bytes: float | None = None
    bits_per_nat: float | None = None  # bits per byte over nats per token; None: losses are of characters


def panels_of(folders: Sequence[Path]) -> list[Panel]:
    """The rows of all folders, by number of workers and by how the text is split."""
    rows: dict[tuple[bool, int], dict[tuple[str, float | None], Row]] = {}
    settings: dict[tuple[bool, int], dict[str, Any]] = {}
    for folder in folders:
        config = read_header(folder)["config"]
        key, told = (config["split"] != "iid", config["num_workers"]), {n: config.get(n) for n in ALIKE}
        last = read_records(folder)[-1]
        told["bits_per_nat"] = (
            round(last["bits_per_byte"] / last["test_loss"], 6) if "bits_per_byte" in last else None
        )
        if settings.setdefault(key, told) != told:
            names = ", ".join(ALIKE)
            raise ValueError(f"runs with {key[1]} workers must be alike in {names}, got {folder}")
        for row in rows_in(folder).values():
            if "mean" in row:  # it is not only searched so far
                rows.setdefault(key, {}).setdefault((row["method"], row["density"]), row)
    return [
        _panel(
            f"{key[1]} workers{', different text' * key[0]}",
            [*found.values()],
            settings[key]["bits_per_nat"],
        )
        for key, found in sorted(rows.items())
    ]


def _panel(title: str, rows: Sequence[Row], bits_per_nat: float | None) -> Panel:
    """A panel of these rows, with the methods of each kind in order of their bytes."""
    panel, unit = Panel(title, {}, {}, bits_per_nat=bits_per_nat), bits_per_nat or 1.0
    for row in rows:
        num_bytes, method, optimizer = received_bytes(row), Method.read(row["method"]), str(row["optimizer"])
        if num_bytes is None:
            print(f"left out, its record has no bytes received: {row['method']}")
        elif method.algorithm == "dense" and not method.rounds.has_updates:
            panel.dense[OPTIMIZERS.get(optimizer, optimizer)] = unit * row["mean"]
        else:
            losses = [unit * loss for loss in (row["mean"], min(row["final"]), max(row["final"]))]
            point = Point(num_bytes, *losses)
            panel.kinds.setdefault(kind_of(row), []).append(point)
    for points in panel.kinds.values():
        points.sort()
    rings = [row["dense_bytes_per_step"] / 2 for row in rows if row.get("dense_bytes_per_step")]
    older = [received_bytes(row) or 0 for row in rows if row["method"] == "dense"]
    return panel._replace(ring_bytes=next(iter([*rings, *(each / 2 for each in older)]), None))


def kind_of(row: Row) -> str:
    """What a method is called, whatever its density, codes and rounds. AdamW is named, Muon not."""
    method = Method.read(row["method"])
    name = OURS if method.algorithm == "topk" else f"{OURS}: {method.algorithm}"
    name = PEERS.get(method.algorithm, name)
    if method.algorithm == "dense" and method.rounds.outer == "nesterov":
        return "MuLoCo" if row["optimizer"] == "muon" else "DiLoCo"
    if method.algorithm == "dense":
        name = "dense updates"
    name += ", returned" if "returned" in method.options else ""
    return f"{name}, AdamW" if row["optimizer"] == "adamw" else name


def looks_of(panels: Sequence[Panel]) -> dict[str, tuple[Style, str]]:
    """A colour, dashes and a marker for each kind, the best first; those beyond seven are grey."""
    best: dict[str, float] = {}
    for panel in panels:
        for kind, points in panel.kinds.items():
            best[kind] = min([best.get(kind, points[0].mean), *(point.mean for point in points)])
    colours = [(METHODS[name].light, METHODS[name].dark) for name in ("regtopk", "topk", "global-topk")]
    looks = {}
    for number, kind in enumerate(sorted(best, key=best.__getitem__)):
        if number < len(MARKERS):
            colour, dashes = [*colours, *SPARE][number], DASHES[number % len(DASHES)]
            looks[kind] = Style(kind, *colour, dashes, width=1.5), MARKERS[number]
        else:
            looks[kind] = replace(OTHER, label=kind), "."
    return looks


def draw(panels: Sequence[Panel]) -> "Figure":
    """All panels side by side, with one axis of losses."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    looks = looks_of(panels)
    means = [point.mean for panel in panels for points in panel.kinds.values() for point in points]
    sizes = [point.num_bytes for panel in panels for points in panel.kinds.values() for point in points]
    sizes += [panel.ring_bytes for panel in panels if panel.ring_bytes]
    means += [mean for panel in panels for mean in panel.dense.values()]
    highest = min(max(means), HIGHEST * min(means))
    with matplotlib.rc_context(STYLE):
        figure = Figure((PANEL_INCHES[0] * len(panels), PANEL_INCHES[1]), layout="constrained")
        FigureCanvasAgg(figure)  # what tells how large a label is
        row = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for axes, panel in zip(row, panels, strict=True):
            _draw_marks(axes, panel, looks, highest)
            axes.set_title(panel.title)
            axes.set_xlabel("bytes received per worker and step")
        room = (highest - min(means)) / 12
        row[0].set_ylim(min(means) - room, highest + room)
        unit = "nats per character" if panels[0].bits_per_nat is None else "bits per byte"
        row[0].set_ylabel(f"test loss, {unit}: mean and range")
        row[0].set_xscale("log")
        row[0].set_xlim(min(sizes) / 3, 4 * max(sizes))
        row[0].xaxis.set_major_formatter(lambda at, _: format_bytes(at))
        row[0].xaxis.set_minor_locator(NullLocator())
        figure.draw_without_rendering()
        for axes, panel in zip(row, panels, strict=True):
            _draw_labels(axes, panel, looks, highest)
        figure.set_layout_engine("none")
    return figure


def _draw_marks(axes: "Axes", panel: Panel, looks: Mapping[str, tuple[Style, str]], highest: float) -> None:
    for kind, points in panel.kinds.items():
        style, marker = looks[kind]
        line = _line_of(points, highest)
        axes.plot([p.num_bytes for p in line], [p.mean for p in line], **line_of(style), **named(style))
        for point in points:
            if point.mean > highest:
                axes.plot(point.num_bytes, highest, "^", ms=7, mfc="none", mec=style.light)
                continue
            size = 10 if kind.startswith(OURS) else 7
            axes.plot(point.num_bytes, point.mean, marker, ms=size, color=style.light, mew=0)
            axes.vlines(point.num_bytes, point.low, point.high, color=style.light, lw=2)
    for number, mean in enumerate(panel.dense.values()):
        axes.axhline(mean, color=METHODS["dense"].light, lw=1.6, ls=(0, DASHES[number] or None), zorder=1)
    if panel.ring_bytes:
        mark_x(axes, panel.ring_bytes, f"bfloat16 ring\n{format_bytes(panel.ring_bytes, 1)}")


def _line_of(points: Sequence[Point], highest: float) -> list[Point]:
    """The points of a kind that are joined: none has a lower loss with as few bytes, or about as few."""
    rivals = {p: [other.mean for other in points if other.num_bytes < SAME * p.num_bytes] for p in points}
    return [p for p in points if p.mean == min(rivals[p]) <= highest]


def _draw_labels(axes: "Axes", panel: Panel, looks: Mapping[str, tuple[Style, str]], highest: float) -> None:
    """A name beside the best point of each kind, and at dense's lines, where nothing else is drawn."""
    left, right = axes.get_xlim()
    drawn = [[(left, mean), (right, mean)] for mean in panel.dense.values()]
    for points in panel.kinds.values():
        drawn += [[(p.num_bytes, min(end, highest)) for end in (p.low, p.high)] for p in points]
        drawn += [[(p.num_bytes, p.mean) for p in pair] for pair in pairwise(_line_of(points, highest))]
    if panel.ring_bytes:
        drawn.append([(panel.ring_bytes, axes.get_ylim()[0]), (panel.ring_bytes, axes.get_ylim()[1])])
    taken = [box for ends in drawn for box in _boxes_along(axes, *ends)]
    grey = METHODS["dense"].light
    for name, mean in panel.dense.items():
        _place(axes, taken, f"dense, {name} {mean:.3f}", (left, mean), grey, BESIDE)
    for kind, points in panel.kinds.items():
        style, best = looks[kind][0], min(points, key=lambda point: point.mean)
        if not style.is_grey:
            text = f"{kind} {best.mean:.3f}" + (" ↑" if best.mean > highest else "")
            _place(axes, taken, text, (best.num_bytes, min(best.mean, highest)), style.light, PLACES)
            for point in _line_of(points, highest):  # what it takes with fewer bytes
                if point != best:
                    at = point.num_bytes, point.mean
                    _place(axes, taken, f"{point.mean:.3f}", at, style.light, PLACES)


def _boxes_along(axes: "Axes", start: tuple[float, float], end: tuple[float, float]) -> "list[Bbox]":
    """Small boxes, in pixels, that cover a line."""
    from matplotlib.transforms import Bbox

    (x0, y0), (x1, y1) = axes.transData.transform([start, end])
    steps = [n / 50 for n in range(51)]
    middles = [(x0 + step * (x1 - x0), y0 + step * (y1 - y0)) for step in steps]
    return [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in middles]


def _place(
    axes: "Axes", taken: "list[Bbox]", text: str, at: tuple[float, float], colour: str,
    places: Sequence[tuple[int, int]],
) -> None:  # fmt: skip
    """Write a label at the place where it covers least of what is drawn, and lies within the panel."""
    frame = axes.get_window_extent()
    found: list[tuple[bool, int, int, Annotation]] = []
    for x, y in places:
        label = axes.annotate(
            text, at, (x, y), textcoords="offset points", color=colour, fontsize=LABEL_POINTS,
            ha="center" if x == 0 else "left" if x > 0 else "right", va="center",
            weight="bold" if text.startswith(OURS) else "normal",
        )  # fmt: skip
        box = label.get_window_extent()
        is_within = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        found.append((not is_within, sum(box.overlaps(other) for other in taken), len(found), label))
    _, _, best, _ = min(found)
    for *_, number, label in found:
        if number == best:
            taken.append(label.get_window_extent())
        else:
            label.remove()


def format_bytes(num_bytes: float, num_decimals: int = 0) -> str:
    """In kB, MB or GB."""
    power = min(3, max(1, int(math.log10(num_bytes) + 1e-9) // 3))
    return f"{num_bytes / 1000**power:.{num_decimals}f} {' kMG'[power]}B"


def describe(panels: Sequence[Panel]) -> str:
    """The points in words."""
    said = []
    for panel in panels:
        dense = [f"dense, {name}: {mean:.3f}" for name, mean in panel.dense.items()]
        points = [f"{k}: {p.mean:.3f} with {p.num_bytes:,.0f}" for k, ps in panel.kinds.items() for p in ps]
        said.append(f"{panel.title}: {'; '.join(dense + points)}.")
    return " ".join(said)


def save(panels: Sequence[Panel], picture: Path) -> None:
    """Write the picture; an SVG takes the colours of a dark page too."""
    figure = draw(panels)
    if picture.suffix == ".png":
        save_png(figure, picture)
        return
    pairs = [INK, GRID, (METHODS["dense"].light, METHODS["dense"].dark)]
    pairs += [(style.light, style.dark) for style, _ in looks_of(panels).values()]
    text = to_svg(figure, TITLE, describe(panels), salt="frontier")
    rules = ""
    for light, dark in pairs:
        text = text.replace(light, f"var(--c{light[1:]}, {light})")
        rules += f"--c{light[1:]}:{dark};"
    style = f"<style>@media(prefers-color-scheme:dark){{svg{{{rules}}}}}</style>"
    picture.write_text(text.replace("<desc>", f"{style}<desc>", 1), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="recorded runs of `regtopk compare gpt`")
    parser.add_argument("picture", type=Path, help="the SVG or PNG file to write")
    given = parser.parse_args()
    save(panels_of(given.folders), given.picture)
