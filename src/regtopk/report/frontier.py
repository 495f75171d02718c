"""Accuracy against bytes per step: one labelled point per method, with its best lr."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from regtopk.method import Method
from regtopk.report.panels import LABEL_POINTS, label_log_axis
from regtopk.report.style import INK, Style
from regtopk.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_INCHES = 9.5
AXES_INCHES = 8.4  # the part of the width that the axes have
LINE_INCHES = 0.17  # between two labels
LETTER_INCHES = 0.052
LEAST_HEIGHT_INCHES = 2.6  # of the axes
BELOW_INCHES = 0.8  # for the axis and its label
TITLE = "Accuracy against bytes per step: mean and range over seeds"
MARGIN = 0.03  # of the axes' width, left of the first point and between points and labels
LEAST_SPREAD = 1.1  # most bytes over fewest: below it, bytes that happen to differ are not worth a figure
LONGEST_TAIL = 10  # times the spread of the better half; a point further below is drawn at the lower edge


class Point(NamedTuple):
    """A method: its bytes per worker and step; mean, lowest and highest accuracy of its seeds."""

    method: str
    num_bytes: float
    mean: float
    low: float
    high: float


class Frontier(NamedTuple):
    """The methods of a run, each with its best lr, and their budget of bytes, if they had one."""

    points: list[Point]
    budget: float | None


def points_of(run: Run) -> list[Point]:
    """A point for each method; none if accuracy was not measured, or a method has several densities."""
    if run.summary.get("metric") != "accuracy":
        return []
    points = [
        Point(r["method"], r["payload_bytes_per_step"], r["mean"], min(r["final"]), max(r["final"]))
        for r in run.summary["results"]
    ]
    return points if len({point.method for point in points}) == len(points) else []


def frontier_of(run: Run) -> Frontier | None:
    """What to draw; None if accuracy or bytes were not measured, or all methods send about as much."""
    points = points_of(run)
    if not points:
        return None
    num_bytes = {point.method: point.num_bytes for point in points}
    budget = num_bytes.get(run.summary.get("base", "")) if run.header["config"].get("like") else None
    if budget is None and max(num_bytes.values()) < LEAST_SPREAD * min(num_bytes.values()):
        return None
    kept = best_lr_of(run)
    return Frontier([point for point in points if point.method in kept], budget)


def best_lr_of(run: Run) -> set[str]:
    """The methods to draw: where several differ in lr only, the base or else the best of them."""
    base = run.summary.get("base")
    results = sorted(run.summary["results"], key=lambda r: (r["method"] == base, r["mean"]))
    return set({Method.read(r["method"]).without("lr"): r["method"] for r in results}.values())


def frontier_inches(frontier: Frontier) -> tuple[float, float]:
    """Width and height: all labels fit below one another."""
    return WIDTH_INCHES, BELOW_INCHES + max(LEAST_HEIGHT_INCHES, LINE_INCHES * len(frontier.points) + 0.3)


def draw_frontier(frontier: Frontier, styles: Mapping[str, Style], axes: "Axes") -> None:
    """Draw points with their range over seeds; labels stand to the right of all points nearby."""
    points = sorted(frontier.points, key=lambda point: point.mean)
    longest = max(len(styles[point.method].label) for point in points)
    label_width = min(0.7, (LETTER_INCHES * (longest + 8) + 0.2) / AXES_INCHES)
    decades = _set_x_axis(axes, points, label_width)
    floor = _set_y_axis(axes, points)
    bottom, top = axes.get_ylim()
    gap = (top - bottom) * LINE_INCHES / (frontier_inches(frontier)[1] - BELOW_INCHES)
    columns = {
        point.method: max(other.num_bytes for other in near) * 10 ** (MARGIN * decades)
        for near in _groups(points, 2 * MARGIN * decades)
        for point in near
    }
    for group in _groups(points, (label_width + 2 * MARGIN) * decades):  # their labels could overlap
        shown = [max(point.mean, floor) for point in group]
        places = spread_apart(shown, gap, bottom + gap / 2, top - gap / 2)
        for point, place in zip(group, places, strict=True):
            _draw_point(axes, point, floor, (columns[point.method], place), styles[point.method])
    axes.set_ylabel("test accuracy, %")
    axes.set_xlabel("bytes a worker contributes each step")
    if frontier.budget is not None:
        axes.axvline(frontier.budget, color=INK[0], lw=1, ls=(0, (4, 3)), zorder=1)
        axes.set_xlabel(f"bytes a worker contributes each step; dashed: the budget, {frontier.budget:,.0f}")


def _set_x_axis(axes: "Axes", points: Sequence[Point], label_width: float) -> float:
    """Leave room for labels right of the last point. Returns how many decades the axis has."""
    low, high = (math.log10(pick(point.num_bytes for point in points)) for pick in (min, max))
    decades = max(1.0, (high - low) / (1 - label_width - 3 * MARGIN))
    axes.set_xscale("log")
    axes.set_xlim(10 ** (low - MARGIN * decades), 10 ** (low + (1 - MARGIN) * decades))
    label_log_axis(axes.xaxis, *axes.get_xlim())
    return decades


def _set_y_axis(axes: "Axes", points: Sequence[Point]) -> float:
    """End the axis above methods that failed. Returns the lowest mean that is drawn in its place."""
    middle, high = median(point.mean for point in points), max(point.high for point in points)
    least = middle - LONGEST_TAIL * max(1.0, high - middle)
    kept = [point.low for point in points if point.mean >= least]
    margin = 0.06 * max(1.0, high - min(kept))
    bottom = max(min(kept), least) - margin
    has_failed = len(kept) < len(points)
    axes.set_ylim(bottom - margin * has_failed, high + margin)
    return bottom


def _groups(points: Sequence[Point], least_decades: float) -> list[list[Point]]:
    """Chains of points with neighbours nearer than that in bytes; a group keeps the order of the points."""
    by_bytes = sorted(point.num_bytes for point in points)
    ends = [at for at, after in pairwise(by_bytes) if math.log10(after / at) > least_decades]
    bounds = pairwise([0.0, *ends, math.inf])
    return [[point for point in points if low < point.num_bytes <= high] for low, high in bounds]


def spread_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones (which rise), at least a gap apart, within the limits."""
    blocks: list[tuple[float, int]] = []  # mean shift and number of neighbours that move together
    for at, place in enumerate(wanted):
        blocks.append((place - at * gap, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (mean, num), (other, num_other) = blocks.pop(), blocks.pop()
            blocks.append(((mean * num + other * num_other) / (num + num_other), num + num_other))
    highest = high - (len(wanted) - 1) * gap
    shifts = [max(low, min(mean, highest)) for mean, num in blocks for _ in range(num)]
    return [shift + at * gap for at, shift in enumerate(shifts)]


def _draw_point(axes: "Axes", point: Point, floor: float, place: tuple[float, float], style: Style) -> None:
    """Draw a dot and its range, or a triangle at the lower edge, and a line that leads to the label."""
    x, y, label = point.num_bytes, max(point.mean, floor), f"{style.label}  {point.mean:.1f}"
    if point.mean < floor:
        label += " ↓"
        axes.plot([x], [y], "v", ms=6, color=style.light, mew=0)
    else:
        axes.plot([x, x], [max(point.low, floor), point.high], color=style.light, lw=2.5, alpha=0.4)
        axes.plot([x], [y], "o", ms=6, color=style.light, mew=0)
    line = dict(arrowstyle="-", color=style.light, lw=0.7, shrinkA=2, shrinkB=0, relpos=(0, 0.5))
    axes.annotate(label, (x, y), place, color=INK[0], fontsize=LABEL_POINTS, va="center", arrowprops=line)
