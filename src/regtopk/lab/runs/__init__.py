"""A run's folder: what experiments write and reports read.

::

    config.json     what was run: experiment, command, configuration, versions, and the panels of its figure
    metrics.jsonl   one record per line, written as it is measured, so a kill loses nothing; the hardware, the
                    software and the search of a record are those of the record before if it names no others
    summary.json    every number that the table shows; written when the run is finished
    figure.png, figure.svg, index.html   drawn from the three files above, by `regtopk.lab.report`

A folder may instead hold several runs in subfolders, named as ``parts`` in its config.json (the demo).
"""

from regtopk.lab.runs.reading import parts_of, read_header, read_object, read_records, read_run, reading_from
from regtopk.lab.runs.run import CONFIG, METRICS, SUMMARY, Panel, Record, Run, make_header, versions
from regtopk.lab.runs.writer import RunWriter, check_holds_no_run, write_json, writing_to

__all__ = [
    "CONFIG", "METRICS", "SUMMARY", "Panel", "Record", "Run", "RunWriter", "check_holds_no_run",
    "make_header", "parts_of", "read_header", "read_object", "read_records",
    "read_run", "reading_from", "versions", "write_json", "writing_to",
]  # fmt: skip
