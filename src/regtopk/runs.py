"""A run's folder: what experiments write and reports read.

::

    config.json     what was run: experiment, command, configuration, versions, and the panels of its figure
    metrics.jsonl   one record a line, written as it is measured, so a kill loses nothing
    summary.json    every number the table shows; there once the run is finished

A folder may instead hold several runs in subfolders, named as ``parts`` in its config.json (the demo).
"""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO, TypeVar

import torch

from regtopk._version import __version__
from regtopk.errors import OutputError

Record = dict[str, Any]
T = TypeVar("T")

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
FIGURE_PNG, FIGURE_SVG, PAGE = "figure.png", "figure.svg", "index.html"
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


class RunWriter:
    """Writes one run into a folder that is claimed first, before anything is computed.

    Args:
        folder: made if missing; refused if it holds a run.
        header: what config.json will say.
        force: replace a run that is there.
        resume: go on with a run that is there, if there is one.
        shared: settings in which it must agree with the new header.

    Raises:
        OutputError: the folder cannot be written, holds a run and neither is on, or holds one of other
            settings.
    """

    def __init__(
        self,
        folder: Path,
        header: Mapping[str, Any],
        *,
        force: bool = False,
        resume: bool = False,
        shared: Mapping[str, Any] | None = None,
    ) -> None:
        is_continued = resume and (folder / CONFIG).exists()
        if not is_continued:
            claim_folder(folder, force=force)
        self.folder = folder
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")
        _lock(self._metrics, folder)
        try:
            self._header = _continued(folder, header, shared or {}) if is_continued else dict(header)
        except OutputError:
            self._metrics.close()
            raise
        if is_continued:
            _drop_torn_line_(folder / METRICS)
        write_json(folder / CONFIG, self._header)

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._metrics.close()

    def add(self, record: Record) -> None:
        """Append one record, at once on disk.

        Raises:
            OutputError: a number in it is not finite, which JSON cannot say: the run diverged.
        """
        try:
            line = json.dumps(record, allow_nan=False)
        except ValueError:
            raise OutputError(f"records must be finite, got {record}: the run diverged") from None
        self._metrics.write(line + "\n")
        self._metrics.flush()

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Change settings of the header: those that only who has the folder to himself can tell."""
        self._header["config"] = {**self._header["config"], **settings}
        write_json(self.folder / CONFIG, self._header)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary: from now on the run counts as finished."""
        write_json(self.folder / SUMMARY, summary)


def _continued(folder: Path, header: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The header of a run that goes on: as it was, with the new settings and, after the old ones, command."""
    old = read_header(folder)
    for key, value in shared.items():
        was = old.get("config", {}).get(key, value)
        if was != value:
            raise OutputError(f"{key} must be {was!r} as in the run that {folder} holds, got {value!r}")
    commands = [*old["command"].splitlines(), header["command"]]
    return {
        **old,
        **header,
        "versions": old["versions"],
        "command": "\n".join(dict.fromkeys(commands)),
        "config": {**old.get("config", {}), **header["config"]},
    }


def _drop_torn_line_(path: Path) -> None:
    """Remove the half-written record that a kill can leave at the end: what it was of runs again."""
    content = path.read_bytes()
    os.truncate(path, content.rfind(b"\n") + 1)


def _lock(file: TextIO, folder: Path) -> None:
    """Only one process writes a folder at a time; the lock goes with the process."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OutputError(f"output folder must not be written by another process, got {folder}") from None


def claim_folder(folder: Path, *, force: bool) -> None:
    """Make the folder and make sure that it can be written and holds no run (or remove that)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = [name for name in FILES if (folder / name).exists()]
        if held and not force:
            raise OutputError(
                f"output folder must not hold a run, but {folder} holds {held[0]}: "
                "choose another --out, go on with --resume (fig3), or replace it with --force"
            )
        if METRICS in held:
            with (folder / METRICS).open("a", encoding="utf-8") as metrics:
                _lock(metrics, folder)  # a run that is still being written is not replaced
        for name in held:
            (folder / name).unlink()
        probe = folder / CONFIG
        probe.touch()
        probe.unlink()
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(
            f"output folder must be writable, got {folder}: {error.strerror or error}"
        ) from error


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
    return _read(folder, METRICS, _parse_lines) if (folder / METRICS).exists() else []


def merge_seeds(records: Sequence[Record]) -> list[Record]:
    """Records of single seeds, by method and step, as one record with a list of values each.

    Where a step of a run was recorded twice, before and after it was resumed, the later one counts.
    """
    if not records or "seed" not in records[0]:
        return list(records)
    merged: dict[tuple[Any, Any], dict[int, Record]] = {}
    for record in records:
        merged.setdefault((record["method"], record["step"]), {})[record["seed"]] = record
    return [_as_lists([by_seed[seed] for seed in sorted(by_seed)]) for by_seed in merged.values()]


def _as_lists(records: Sequence[Record]) -> Record:
    """Measured numbers become lists, except the bytes, which are averaged."""
    first = dict(records[0])
    for name in ("accuracy", "loss", "test_loss"):
        first[name] = [record[name] for record in records if record[name] is not None]
    first["payload_bytes"] = sum(record["payload_bytes"] for record in records) / len(records)
    return first


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write readable JSON, all of it or, at a kill, nothing."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    new.replace(path)


def _read(folder: Path, name: str, parse: Callable[[str], T]) -> T:
    path = folder / name
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = f"not JSON, {error}"
    raise OutputError(f"folder must hold a finished run, but {path} cannot be read: {reason}")


def _parse_object(text: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)
    return content


def _parse_lines(text: str) -> list[Record]:
    """A line that a kill left torn is not read."""
    return [_parse_object(line) for line in text[: text.rfind("\n") + 1].splitlines()]
