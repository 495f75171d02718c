"""Print a recorded run's finding and table for a document: python tools/tables.py FOLDER."""

import argparse
import re
import sys
from pathlib import Path

from regtopk.errors import RegtopkError
from regtopk.lab.method import Method
from regtopk.lab.report import columns_of, format_number, heading_of
from regtopk.lab.report.style import hardware_and_time, label_of
from regtopk.lab.runs import Run, read_run


def as_markdown(folder: Path) -> str:
    """The finding, the table, the hardware and the time; methods have the names of the figures."""
    run = read_run(folder)
    rows = run.summary["table"]
    columns = columns_of(rows)
    head = [heading_of(name) or "method" for name in columns]
    lines = [_finding(run), "", f"| {' | '.join(head)} |", "|---" * len(columns) + "|"]
    for row in rows:
        method = _label(run, Method.read(row["measure"]).without("lr"))  # the learning rate has a column
        cells = [method, *(format_number(row.get(name)) for name in columns[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", hardware_and_time(run.summary)]).lstrip() + "\n"


def _finding(run: Run) -> str:
    """What was found; a command in it keeps the words that one types."""
    methods = {row["measure"] for row in run.summary["table"]}
    words = re.split(r"([:;,.]?(?:\s|$))", run.summary.get("finding", ""))
    return "".join(f"*{_label(run, word)}*" if word in methods else word for word in words)


def _label(run: Run, method: str) -> str:
    """A method's name; at equal bytes it tells how values are coded."""
    config = run.header["config"]
    is_open = config["like"] and "value_code" not in Method.read(method).options
    return label_of(f"{method}:value_code={config['value_code']}" if is_open else method)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a recorded run of fig3")
    try:
        sys.stdout.write(as_markdown(parser.parse_args().folder))
    except RegtopkError as error:
        parser.error(str(error))
