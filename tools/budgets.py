"""Draw accuracy against payload per step, of runs that differ in their budget only.

``python tools/budgets.py FOLDER FOLDER ... PICTURE``
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from regtopk.lab.method import Method
from regtopk.lab.report.figure import Drawing, draw_all, save_png
from regtopk.lab.report.panels import line_of
from regtopk.lab.report.style import Style, styles_of
from regtopk.lab.runs import Run, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Accuracy against payload per step: mean and range"
SIZE_INCHES = (7.0, 4.2)


class Point(NamedTuple):
    """A method: its payload per worker and step; mean, lowest and highest accuracy of its seeds."""

    method: str
    num_bytes: float
    mean: float
    low: float
    high: float


def points_of(run: Run) -> list[Point]:
    """A point for each method."""
    return [
        Point(r["method"], r["payload_bytes_per_step"], r["mean"], min(r["final"]), max(r["final"]))
        for r in run.summary["results"]
    ]


def curves_of(runs: Sequence[Run]) -> dict[str, list[Point]]:
    """The points of each method that all runs have, at whatever density, in order of their bytes."""
    found: dict[str, list[Point]] = {}
    for run in runs:
        for point in points_of(run):
            found.setdefault(Method.read(point.method).without("density"), []).append(point)
    return {
        method: sorted(points, key=lambda point: point.num_bytes)
        for method, points in found.items()
        if len(points) == len(runs) and points[0].num_bytes != points[-1].num_bytes
    }


def draw_budgets(runs: Sequence[Run], picture: Path) -> None:
    """Draw one line per method, over all budgets."""
    curves = curves_of(runs)
    styles = styles_of(list(curves), value_code=runs[0].header["config"].get("value_code", ""))
    drawing = Drawing(TITLE, SIZE_INCHES, partial(_draw, curves, styles))
    save_png(draw_all([drawing], list(styles.values())), picture)


def _draw(curves: dict[str, list[Point]], styles: dict[str, Style], axes: "Axes") -> None:
    for method, points in curves.items():
        x, means = [point.num_bytes for point in points], [point.mean for point in points]
        line = line_of(styles[method])
        axes.plot(x, means, marker="o", ms=5, **line)
        below = [point.mean - point.low for point in points]
        above = [point.high - point.mean for point in points]
        axes.errorbar(x, means, (below, above), fmt="none", ecolor=line["color"], elinewidth=2)
    budgets = [point.num_bytes for point in points]
    axes.set_xscale("log")
    axes.set_xticks(budgets, [f"{num_bytes / 1e3:.0f}" for num_bytes in budgets])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("payload of a worker per step, kB")
    axes.set_ylabel("test accuracy, %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="recorded runs of fig3 at equal bytes")
    parser.add_argument("picture", type=Path, help="the PNG file to write")
    given = parser.parse_args()
    draw_budgets([read_run(folder) for folder in given.folders], given.picture)
