"""A run's folder: what experiments write and reports read.

::

    config.json     what was run: experiment, command, configuration, versions, and the panels of its figure
    metrics.jsonl   one record a line, written as it is measured, so a kill loses nothing
    summary.json    every number the table shows; there once the run is finished

A folder may instead hold several runs in subfolders, named as ``parts`` in its config.json (the demo).
"""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from regtopk._version import __version__
from regtopk.errors import OutputError

Record = dict[str, Any]
T = TypeVar("T")

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
FIGURE_PNG, FIGURE_SVG, PAGE = "figure.png", "figure.svg", "index.html"
ALIKE = {"density", "lr", "published"}  # numbers that the seeds of a method share
FILES = (CONFIG, METRICS, SUMMARY, FIGURE_PNG, FIGURE_SVG, PAGE)


@dataclass(frozen=True)
class Panel:
    """One set of axes: which fields of the records are drawn against which, one curve a method.

    Args:
        title: above the axes.
        x: field of the records.
        y: field of the records; a list there is one value a seed, drawn as median and range.
        x_label, y_label: along the axes.
        where: only records with these values, or with None there, are drawn.
        log_x, log_y: logarithmic axes; values <= 0 are left out.
        marks: "line", "stems" for lengths of single steps, or "bars" for the last y of each method.
        dots: a second field, drawn as circles over the curve (published points).
        x_max, y_min: where the axes end.
    """

    title: str
    x: str
    y: str
    x_label: str
    y_label: str
    where: Mapping[str, Any] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    marks: Literal["line", "stems", "bars"] = "line"
    dots: str | None = None
    x_max: float | None = None
    y_min: float | None = None


@dataclass(frozen=True)
class Run:
    """A finished run, as read back."""

    folder: Path
    header: dict[str, Any]
    records: list[Record]
    summary: dict[str, Any]

    @property
    def panels(self) -> list[Panel]:
        """The panels of its figure."""
        return [Panel(**panel) for panel in self.header["panels"]]


def make_header(
    experiment: str,
    *,
    title: str,
    about: str,
    command: str,
    config: Mapping[str, Any],
    panels: Sequence[Panel],
) -> dict[str, Any]:
    """What config.json holds for a run."""
    return {
        "experiment": experiment,
        "title": title,
        "about": about,
        "command": command,
        "config": dict(config),
        "versions": versions(),
        "panels": [asdict(panel) for panel in panels],
    }


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "regtopk": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def read_header(folder: Path) -> dict[str, Any]:
    """The config.json of a run, or of a folder of several."""
    return _read(folder, CONFIG, _parse_object)


def read_run(folder: Path) -> Run:
    """Read a finished run back.

    Raises:
        OutputError: there is none, or it was not finished.
    """
    header, summary = read_header(folder), _read(folder, SUMMARY, _parse_object)
    return Run(folder, header, merge_seeds(_read(folder, METRICS, _parse_lines)), summary)


def read_records(folder: Path) -> list[Record]:
    """The records of a run so far; none if it has not begun."""
    return _read(folder, METRICS, _parse_lines, "a run") if (folder / METRICS).exists() else []


def merge_seeds(records: Sequence[Record]) -> list[Record]:
    """Records of single seeds, by method and step, as one record with a list of values each.

    Where a step of a run was recorded twice, before and after it was resumed, the later one counts.
    """
    if not records or "seed" not in records[0]:
        return list(records)
    merged: dict[tuple[Any, ...], dict[int, Record]] = {}
    for record in records:
        key = record["method"], record["density"], record["step"]
        merged.setdefault(key, {})[record["seed"]] = record
    return [_as_lists([by_seed[seed] for seed in sorted(by_seed)]) for by_seed in merged.values()]


def _as_lists(records: Sequence[Record]) -> Record:
    """Measured numbers become lists, except the bytes, which are averaged."""
    first = dict(records[0])
    for name in first.keys() - ALIKE:
        values = [record[name] for record in records if record[name] is not None]
        if all(isinstance(value, float) for value in values):
            first[name] = values
    first["payload_bytes"] = sum(record["payload_bytes"] for record in records) / len(records)
    return first


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write readable JSON, all of it or, at a kill, nothing."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    new.replace(path)


def _read(folder: Path, name: str, parse: Callable[[str], T], what: str = "a finished run") -> T:
    path = folder / name
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = f"not JSON, {error}"
    raise OutputError(f"folder must hold {what}, but {path} cannot be read: {reason}")


def _parse_object(text: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)
    return content


def _parse_lines(text: str) -> list[Record]:
    """A line that a kill left torn is not read."""
    records = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            records.append(_parse_object(line))
        except ValueError as error:
            raise ValueError(f"record {number}: {error}") from None
    return records
