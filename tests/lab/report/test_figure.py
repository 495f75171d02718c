"""Figures stay readable with any number of methods; warnings of matplotlib are errors here."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from regtopk.lab.report.figure import draw_all, drawings_of, styles_of_run
from regtopk.lab.report.style import FEW, MAX_COLOURS
from regtopk.lab.runs import Panel, Run, make_header
from tests.lab.report.test_page import page_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = (
    Panel("Accuracy, by rounds", "step", "accuracy", "round", "accuracy"),
    Panel("Loss", "step", "loss", "round", "loss"),
    Panel("Accuracy, by bytes", "payload_bytes", "accuracy", "bytes", "accuracy", log_x=True),
    Panel("At the end", "step", "accuracy", "accuracy", "", marks="bars"),
)
BASE = "topk:density=0.01:index_code=raw32:value_code=float32"
METHODS = [BASE, "regtopk:mu=1", "dense", "global-topk"]
METHODS += [f"consensus:score=regtopk:mu={mu}:value_code=2bit" for mu in range(8)]
METHODS += [f"other-{number}" for number in range(8)]


def make_run(num_methods: int, *, like: str = "topk:0.01:raw32:float32") -> Run:
    records: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for number, method in enumerate(METHODS[:num_methods]):
        num_bytes = 80_000.0 if method == "dense" else 1592.0 - number % 3
        final = [90.0 + 0.2 * number, 91.0 + 0.1 * number]
        measured = {"payload_bytes_per_step": num_bytes, "mean": sum(final) / 2, "final": final}
        results.append({"method": method, **measured})
        for step in (1, 2, 3):
            measured = {"accuracy": [value * step / 3 for value in final], "loss": [3.0 / step]}
            records.append({"method": method, "step": step, "payload_bytes": num_bytes * step, **measured})
    ranked = sorted(results, key=lambda r: -r["mean"])
    table = [{"measure": r["method"], "accuracy": r["mean"], "diverged": None} for r in ranked]
    header = make_header("fig3", title="t", about="a", command="c", config={"like": like}, panels=PANELS)
    summary = {"metric": "accuracy", "base": BASE, "results": results, "table": table}
    return Run(Path(), header, records, summary)


def draw(run: Run) -> "Figure":
    figure = draw_all(drawings_of(run), list(styles_of_run(run).values()))
    figure.draw_without_rendering()
    return figure


@cache
def drawn(num_methods: int) -> "Figure":
    """Drawn once for all tests that only look at it."""
    return draw(make_run(num_methods))


@pytest.mark.parametrize("num_methods", [1, MAX_COLOURS, MAX_COLOURS + 1, len(METHODS)])
def test_axes_keep_their_size_and_nothing_overlaps(num_methods: int) -> None:
    figure = drawn(num_methods)
    assert len(figure.axes) == len(PANELS)
    for axes in figure.axes:
        box = axes.get_window_extent()
        assert min(box.width, box.height) > 2 * figure.dpi  # inches
    (legend,) = figure.subfigs[-1].legends
    whole, keys = figure.bbox, legend.get_window_extent()
    assert keys.x0 >= whole.x0 and keys.x1 <= whole.x1 and keys.y0 >= whole.y0
    for tight in [axes.get_tightbbox() for axes in figure.axes]:
        assert tight is not None and not tight.overlaps(keys)
    assert len(legend.get_texts()) == (num_methods if num_methods <= MAX_COLOURS else FEW + 1)


def test_one_order_everywhere() -> None:
    run = make_run(len(METHODS))
    figure, styles = drawn(len(METHODS)), styles_of_run(run)
    assert list(styles) == [row["measure"] for row in run.summary["table"]]
    labels = [style.label for style in styles.values()]
    bars = figure.axes[3]
    assert [text.get_text().replace("\n", " ") for text in bars.get_yticklabels()] == labels
    assert bars.yaxis_inverted()  # the first is at the top
    *few, others = [text.get_text() for text in figure.subfigs[-1].legends[0].get_texts()]
    assert few == [label for label in labels if label in few] and others == "14 others"


def test_bars_are_the_numbers_of_the_table() -> None:
    run = make_run(3)
    dots = [line for line in drawn(3).axes[3].get_lines() if line.get_marker() == "o"]
    accuracies = [row["accuracy"] for row in run.summary["table"]]
    assert [np.asarray(dot.get_xdata()).item() for dot in dots] == accuracies
    assert drawn(3).axes[3].get_xlabel() == "accuracy\n(the axis begins at 89.9)"


def test_a_single_evaluation_is_drawn_as_a_point() -> None:
    run = make_run(2)
    run.records[:] = [record for record in run.records if record["step"] == 3]
    assert [line.get_marker() for line in draw(run).axes[0].get_lines()] == ["o", "o"]


def write(run: Run, folder: Path) -> str:
    return page_of(folder, run.header, run.summary, run.records)


def test_page_of_twenty_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regtopk.lab.report.page.draw_files", lambda *_: None)  # which other tests draw
    page = write(make_run(20), tmp_path)
    assert page.count("<figure") == len(PANELS) and page.count('<figure class="tall">') == 1
    assert '<div class="panels"><div class="legend">' in page  # it fills the place beside the tall one
    assert "14 others</li>" in page
    assert f'<td title="{BASE}">' in page and "Top-k, 1 %, raw32, float32 (base)</td>" in page
    assert "<th>diverged</th>" not in page  # nothing to say
    assert page.count("<title>other-7</title>") == len(PANELS) - 1  # each curve names itself


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_how_many_seeds_there_are(tmp_path: Path) -> None:
    run = make_run(3)
    run.header["panels"] = run.header["panels"][:1]  # a short page
    assert "<p>2 seeds. Curves are medians" in write(run, tmp_path / "two")
    run.summary["results"][0]["final"] = [90.5]
    assert "<p>1 to 2 seeds. " in write(run, tmp_path / "some")
    for result in run.summary["results"]:
        result["final"] = [result["mean"]]
    assert "<p>One seed: the spread is not known" in write(run, tmp_path / "one")


def test_at_equal_bytes_a_method_is_drawn_with_its_best_lr_alone_and_the_base_always() -> None:
    run = make_run(2)
    for method, mean in (("regtopk:mu=1:lr=0.5", 99.0), (f"{BASE}:lr=0.5", 99.0)):
        run.summary["results"].append({**run.summary["results"][1], "method": method, "mean": mean})
        run.records.append({**run.records[-1], "method": method})
    assert list(styles_of_run(run)) == [BASE, "regtopk:mu=1:lr=0.5"]
    draw(run)
