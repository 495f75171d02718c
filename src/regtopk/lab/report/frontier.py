"""Accuracy against bytes per step: one point per method, with its best lr."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from regtopk.lab.method import Method
from regtopk.lab.report.panels import label_log_axis, mark_x, named
from regtopk.lab.report.style import Style
from regtopk.lab.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "Final accuracy against bytes per step"
LABELS = {"payload": "bytes of payload per worker and step", "received": "bytes received per worker and step"}
LEAST_SPREAD = 1.1  # most bytes over fewest: below it, bytes that happen to differ are not worth a figure


class Point(NamedTuple):
    """A method: its bytes per worker and step; mean, lowest and highest accuracy of its seeds."""

    method: str
    num_bytes: float
    mean: float
    low: float
    high: float


class Frontier(NamedTuple):
    """The methods of a run, which bytes are drawn, and the budget of these, if there was one."""

    points: list[Point]
    axis: str
    budget: float | None


def points_of(run: Run, axis: str = "payload") -> list[Point]:
    """A point for each method; none if accuracy was not measured, or a method has several densities."""
    if run.summary.get("metric") != "accuracy":
        return []
    points = [
        Point(r["method"], r[f"{axis}_bytes_per_step"], r["mean"], min(r["final"]), max(r["final"]))
        for r in run.summary["results"]
    ]
    return points if len({point.method for point in points}) == len(points) else []


def frontier_of(run: Run) -> Frontier | None:
    """What to draw, in the bytes of the budget; None if accuracy was not measured, or bytes hardly differ."""
    config, results = run.header["config"], run.summary.get("results", [])
    is_payload = config.get("like") or config.get("bytes_per_step")
    has_received = all(r.get("received_bytes_per_step") for r in results)  # older runs and one worker do not
    axis = "received" if has_received and not is_payload else "payload"
    points = points_of(run, axis)
    if not points:
        return None
    num_bytes = {point.method: point.num_bytes for point in points}
    budget = (
        num_bytes.get(run.summary.get("base", ""))
        if config.get("like") or config.get("like_received")
        else None
    )
    if budget is None and max(num_bytes.values()) < LEAST_SPREAD * min(num_bytes.values()):
        return None
    kept = best_lr_of(run)
    return Frontier([point for point in points if point.method in kept], axis, budget)


def best_lr_of(run: Run) -> set[str]:
    """The methods to draw: where several differ in lr only, the base or else the best of them."""
    base = run.summary.get("base")
    results = sorted(run.summary["results"], key=lambda r: (r["method"] == base, r["mean"]))
    return set({Method.read(r["method"]).without("lr"): r["method"] for r in results}.values())


def draw_frontier(frontier: Frontier, styles: Mapping[str, Style], axes: "Axes") -> None:
    """A point for each method with its range over seeds; the legend and the table say which is which."""
    for point in frontier.points:
        x, style = point.num_bytes, styles[point.method]
        axes.plot([x, x], [point.low, point.high], color=style.light, lw=2.5, alpha=0.4)
        axes.plot([x], [point.mean], "o", ms=6, color=style.light, mew=0, **named(style))
    axes.set_xscale("log")
    axes.margins(x=0.08)
    label_log_axis(axes.xaxis, *axes.get_xlim())
    low = axes.get_ylim()[0]
    axes.set_ylabel("test accuracy, %" if low <= 0 else f"test accuracy, %\n(the axis begins at {low:.3g})")
    axes.set_xlabel(LABELS[frontier.axis])
    if frontier.budget is not None:
        mark_x(axes, frontier.budget, f"the budget, {frontier.budget:,.0f}")


def describe_frontier(frontier: Frontier, styles: Mapping[str, Style]) -> str:
    """The points in words, for those who cannot see them."""
    points = {point.method: f"{point.mean:.1f} with {point.num_bytes:,.0f}" for point in frontier.points}
    said = [f"{style.label}: {points[method]}" for method, style in styles.items() if method in points]
    return f"Test accuracy in percent, with {LABELS[frontier.axis]}: {'; '.join(said)}."
