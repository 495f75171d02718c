"""Print a recorded run's finding and table for a document: python tools/tables.py FOLDER."""

import argparse
import sys
from pathlib import Path

from regtopk.errors import RegtopkError
from regtopk.report import columns_of, format_number, heading_of
from regtopk.report.style import hardware_and_time
from regtopk.runs import read_run


def as_markdown(folder: Path) -> str:
    """The finding, the table, the hardware and the time."""
    run = read_run(folder)
    rows = run.summary["table"]
    columns = columns_of(rows)
    head = [heading_of(name) or "method" for name in columns]
    lines = [run.summary.get("finding", ""), "", f"| {' | '.join(head)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(format_number(row.get(name)) for name in columns)} |" for row in rows]
    return "\n".join([*lines, "", hardware_and_time(run.summary)]).lstrip() + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a recorded run of fig3")
    try:
        sys.stdout.write(as_markdown(parser.parse_args().folder))
    except RegtopkError as error:
        parser.error(str(error))
