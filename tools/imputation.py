"""Draw what docs/imputation.md shows: python tools/imputation.py --out docs/figures.

The accuracies are those of the recorded runs in docs/results/imputation.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regtopk.errors import RegtopkError
from regtopk.lab.method import Method
from regtopk.lab.report.figure import Drawing, draw_all, save_png
from regtopk.lab.report.panels import label_log_axis, line_of
from regtopk.lab.report.style import METHODS, SPARE, Style
from regtopk.lab.runs import read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUNS = Path(__file__).parents[1] / "docs" / "results" / "imputation"
TITLES = {"iid": "Data spread evenly", "sorted": "Data sorted by label"}
PANEL_INCHES = (4.5, 3.3)
FIXED = Style("a fixed rho", METHODS["topk"].light, METHODS["topk"].dark, width=2.0)
LEARNED = Style("learned", *SPARE[4], (3.7, 1.6), width=1.6)
DENSE = METHODS["dense"]

Row = dict[str, Any]


def draw(folder: Path, picture: Path) -> None:
    """Test error against rho, one panel for each way to spread the data."""
    drawings = [
        Drawing(title, PANEL_INCHES, partial(_draw_error, read_run(folder / name).summary["table"]))
        for name, title in TITLES.items()
    ]
    save_png(draw_all(drawings, [FIXED, LEARNED, DENSE]), picture)


def by_rho(rows: list[Row]) -> dict[float, Row]:
    """The rows of Top-k with a fixed rho, ascending."""
    methods = {row["measure"]: Method.read(row["measure"]) for row in rows}
    found = {
        float(method.options.get("impute", 0.0)): row  # type: ignore[arg-type]
        for row in rows
        if (method := methods[row["measure"]]).algorithm == "topk"
        and method.options.get("impute") != "learned"
    }
    return dict(sorted(found.items()))


def _draw_error(rows: list[Row], axes: "Axes") -> None:
    fixed = by_rho(rows)
    spread = [row["± std"] for row in fixed.values()]
    error = [100 - row["accuracy"] for row in fixed.values()]
    axes.errorbar(list(fixed), error, yerr=spread, marker="o", ms=4, capsize=2, **line_of(FIXED))
    flat = {"topk:impute=learned": LEARNED, "dense": DENSE}
    for row in rows:
        if row["measure"] in flat:
            axes.axhline(100 - row["accuracy"], **line_of(flat[row["measure"]]))
    axes.set_yscale("log")
    label_log_axis(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel("rho")
    axes.set_ylabel("test error, %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder to draw into")
    given = parser.parse_args()
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        draw(RUNS, given.out / "imputation.png")
    except RegtopkError as error:
        parser.error(str(error))
