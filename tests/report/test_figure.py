"""Figures stay readable with any number of methods; warnings of matplotlib are errors here."""

from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from matplotlib.text import Text

from regtopk.report.figure import draw_all, drawings_of, styles_of_run
from regtopk.report.frontier import Frontier, Point, frontier_of, spread_apart
from regtopk.report.page import write_report
from regtopk.runs import Panel, Run, RunWriter, make_header

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

PANELS = (
    Panel("Accuracy, by rounds", "step", "accuracy", "round", "accuracy"),
    Panel("Loss", "step", "loss", "round", "loss"),
    Panel("Accuracy, by bytes", "payload_bytes", "accuracy", "bytes", "accuracy", log_x=True),
    Panel("At the end", "step", "accuracy", "accuracy", "", marks="bars"),
)
BASE = "topk:density=0.01:index_code=raw32:value_code=float32"
METHODS = (
    BASE,
    "regtopk:mu=1",
    "dense",
    "global-topk",
    *(f"consensus:score=regtopk:mu={mu}:value_code=2bit" for mu in range(8)),
    *(f"other-{number}" for number in range(8)),
)


def make_run(num_methods: int, *, like: str = "topk:0.01:raw32:float32") -> Run:
    records: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, method in enumerate(METHODS[:num_methods]):
        num_bytes = 80_000.0 if method == "dense" else 1592.0 - number % 3
        final = [90.0 + 0.2 * number, 91.0 + 0.1 * number] if number != 9 else [10.0, 12.0]
        results.append(
            {"method": method, "payload_bytes_per_step": num_bytes, "mean": sum(final) / 2, "final": final}
        )
        for step in (1, 2, 3):
            measured = {"accuracy": [value * step / 3 for value in final], "loss": [3.0 / step]}
            records.append({"method": method, "step": step, "payload_bytes": num_bytes * step, **measured})
    table = [{"measure": r["method"], "accuracy": r["mean"], "diverged": None} for r in results]
    header = make_header("fig3", title="t", about="a", command="c", config={"like": like}, panels=PANELS)
    summary = {"metric": "accuracy", "base": BASE, "results": results, "table": table}
    return Run(Path(), header, records, summary)


def draw(run: Run) -> "Figure":
    figure = draw_all(drawings_of(run), list(styles_of_run(run).values()))
    figure.draw_without_rendering()
    return figure


def inches(box: "Bbox", figure: "Figure") -> tuple[float, float]:
    return box.width / figure.dpi, box.height / figure.dpi


def texts_of(axes: "Axes") -> list["Bbox"]:
    return [Text.get_window_extent(text) for text in axes.texts]  # without the lines that lead to them


@pytest.mark.parametrize("num_methods", [1, 2, 3, 6, 9, 13, 17, len(METHODS)])
def test_axes_keep_their_size_and_nothing_overlaps(num_methods: int) -> None:
    figure = draw(make_run(num_methods))
    assert len(figure.axes) == len(PANELS) + 1
    for axes in figure.axes:
        width, height = inches(axes.get_window_extent(), figure)
        assert width > 2 and height > 2
    (legend,) = figure.subfigs[-1].legends
    whole, keys = figure.bbox, legend.get_window_extent()
    assert keys.x0 >= whole.x0 and keys.x1 <= whole.x1 and keys.y0 >= whole.y0
    for box in [axes.get_tightbbox() for axes in figure.axes]:
        assert box is not None and not box.overlaps(keys)
    assert len(legend.get_texts()) == num_methods


@pytest.mark.parametrize("num_methods", [2, 11, 20])
def test_labels_of_points_do_not_overlap(num_methods: int) -> None:
    axes = draw(make_run(num_methods)).axes[-1]
    boxes = texts_of(axes)
    assert len(boxes) == num_methods
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    room = axes.get_window_extent()
    assert all(room.x0 < box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 + 2 for box in boxes)


def test_a_method_that_failed_does_not_flatten_the_others() -> None:
    axes = draw(make_run(20)).axes[-1]
    assert axes.get_ylim()[0] > 50
    assert [text.get_text() for text in axes.texts if "↓" in text.get_text()] == [
        "consensus, score=regtopk, mu=5, 2bit  11.0 ↓"
    ]


def test_budget_is_marked() -> None:
    assert "the budget, 1,592" in draw(make_run(3)).axes[-1].get_xlabel()
    assert "budget" not in draw(make_run(3, like="")).axes[-1].get_xlabel()


def test_where_there_is_no_frontier() -> None:
    assert frontier_of(make_run(2, like="")) is None  # the same bytes for all
    several = make_run(3)
    several.summary["results"] *= 2
    assert frontier_of(several) is None
    other = make_run(3)
    other.summary["metric"] = "distance"
    assert frontier_of(other) is None


def test_frontier_is_the_summary() -> None:
    assert frontier_of(make_run(1)) == Frontier([Point(BASE, 1592.0, 90.5, 90.0, 91.0)], 1592.0)


def test_a_single_evaluation_is_drawn_as_a_point() -> None:
    run = make_run(2)
    run.records[:] = [record for record in run.records if record["step"] == 3]
    assert [line.get_marker() for line in draw(run).axes[0].get_lines()] == ["o", "o"]


def test_labels_are_spread_apart() -> None:
    assert spread_apart([1.0, 5.0], 1.0, 0.0, 10.0) == [1.0, 5.0]
    assert spread_apart([5.0, 5.0, 5.0], 1.0, 0.0, 10.0) == [4.0, 5.0, 6.0]
    assert spread_apart([0.0, 0.0], 1.0, 0.0, 10.0) == [0.0, 1.0]
    assert spread_apart([10.0, 10.0], 1.0, 0.0, 10.0) == [9.0, 10.0]


def test_page_of_twenty_methods(tmp_path: Path) -> None:
    run = make_run(20)
    with RunWriter(tmp_path, run.header) as writer:
        for record in run.records:
            writer.add(record)
        writer.finish(run.summary)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count("<figure") == len(PANELS) + 1 and page.count('<figure class="row">') == 1
    assert f'<td title="{BASE}">' in page and "Top-k, 1 %, raw32, float32 (base)</td>" in page
    assert "<th>diverged</th>" not in page  # nothing to say


def test_at_equal_bytes_a_method_is_drawn_with_its_best_lr_alone_and_the_base_always() -> None:
    run = make_run(2)
    for method, mean in (("regtopk:mu=1:lr=0.5", 99.0), (f"{BASE}:lr=0.5", 99.0)):
        run.summary["results"].append({**run.summary["results"][1], "method": method, "mean": mean})
        run.records.append({**run.records[-1], "method": method})
    frontier = frontier_of(run)
    assert frontier is not None
    assert [point.method for point in frontier.points] == [BASE, "regtopk:mu=1:lr=0.5"]
    assert list(styles_of_run(run)) == [BASE, "regtopk:mu=1:lr=0.5"]
    draw(run)
