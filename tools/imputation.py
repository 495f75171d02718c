"""Draw the figure of docs/imputation.md from the recorded runs: python tools/imputation.py."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regtopk.lab.report.figure import Drawing, draw_all, save_png
from regtopk.lab.report.panels import label_log_axis, line_of
from regtopk.lab.report.style import METHODS, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[1] / "docs"
TITLES = {"iid": "Data spread evenly", "sorted": "Data sorted by label"}
ERRORS = (2.5, 100.0)  # the same axis in both panels
FIXED = Style("Top-k with rho", METHODS["topk"].light, METHODS["topk"].dark, width=2.0)


def draw() -> None:
    """Test error against rho, one panel for each way to spread the data."""
    drawings = []
    for name, title in TITLES.items():
        summary = DOCS / "results" / "imputation" / name / "summary.json"
        table = json.loads(summary.read_text(encoding="utf-8"))["table"]
        drawings.append(Drawing(title, (4.5, 3.3), partial(_draw_error, table)))
    save_png(draw_all(drawings, [FIXED, METHODS["dense"]]), DOCS / "figures" / "imputation.png")


def _draw_error(rows: list[dict[str, Any]], axes: "Axes") -> None:
    by_method = {row["measure"]: row for row in rows}
    rhos = [0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0]
    fixed = [by_method[f"topk:impute={rho:g}" if rho else "topk"] for rho in rhos]
    error = [100 - row["accuracy"] for row in fixed]
    axes.errorbar(rhos, error, [row["± std"] for row in fixed], marker="o", ms=4, capsize=2, **line_of(FIXED))
    axes.axhline(100 - by_method["dense"]["accuracy"], **line_of(METHODS["dense"]))
    axes.set_yscale("log")
    axes.set_ylim(ERRORS)
    label_log_axis(axes.yaxis, *ERRORS)
    axes.set_xlabel("rho, the option impute")
    axes.set_ylabel("test error, %: mean ± std")


if __name__ == "__main__":
    draw()
