"""Write the tables of docs/deep-networks.md from the recorded runs: python tools/tables.py.

A table stands between "<!-- made: NAME -->" and "<!-- end -->", where docs/results/NAME is the run; "NAME 5"
has its first five rows. Of the learning rates that a method ran with, the table has the best.
"""

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "deep-networks.md"
BLOCK = re.compile(r"(<!-- made: ([\w-]+) ?(\d*) -->\n).*?<!-- end -->", re.DOTALL)


def table_of(name: str, num_rows: int) -> str:
    """One row per method, best first: accuracy in percent, with its standard deviation over seeds."""
    rows = json.loads((DOCS / "results" / name / "summary.json").read_text(encoding="utf-8"))["table"]
    base = "from base" if "from base" in rows[0] else "from Top-k"
    lines = [
        f"| method | lr | payload per step | accuracy | seeds | {base}, 95 % interval |",
        "|---|---:|---:|---:|---:|---|",
    ]
    shown = set()
    for row in sorted(rows, key=lambda row: -row["accuracy"]):
        method = re.sub(":lr=[^:]+", "", row["measure"])
        if method not in shown:
            shown.add(method)
            size, seeds = f"{row['payload per step']:,.0f}", row["seeds"]
            cells = [f"`{method}`", row["lr"], size, _accuracy(row), seeds, _gain(row, base)]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines[: 2 + num_rows]) + "\n"


def _accuracy(row: dict[str, Any]) -> str:
    spread = row.get("± std")
    return f"{row['accuracy']:.1f}" + (f" ± {spread:.1f}" if spread is not None else "")


def _gain(row: dict[str, Any], base: str) -> str:
    if row.get(base) is None:
        return "–"
    interval = row.get("95 % interval")
    return f"{row[base]:+.1f}" + (f" ({interval})" if interval else "")


def with_tables(page: str) -> str:
    """The page with its tables written anew."""

    def write(block: re.Match[str]) -> str:
        return f"{block[1]}\n{table_of(block[2], int(block[3] or 100))}\n<!-- end -->"

    return BLOCK.sub(write, page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
