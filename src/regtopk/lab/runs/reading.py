"""Reading a run's folder back; an `OutputError` says what is no run."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from regtopk.errors import OutputError, RegtopkError
from regtopk.lab.runs.run import CARRIED, CONFIG, METRICS, SUMMARY, Record, Run

T = TypeVar("T")

ANY_HEADER = {"title": str, "about": str, "command": str, "versions": dict}
RUN_HEADER = ANY_HEADER | {"experiment": str, "config": dict, "panels": list}


def read_header(folder: Path, types: Mapping[str, type] = ANY_HEADER) -> dict[str, Any]:
    """The config.json of a run, or of a folder of several."""
    header = _read(folder / CONFIG, _parse_object)
    for name, kind in types.items():
        given = header.get(name)
        if not isinstance(given, kind):
            raise OutputError(f"{folder / CONFIG} must have {name!r} of type {kind.__name__}, got {given!r}")
    return header


def parts_of(folder: Path, header: Mapping[str, Any]) -> list[Path]:
    """The subfolders that a folder of several runs names; none for a single run."""
    parts = header.get("parts", [])
    is_list = isinstance(parts, list) and all(isinstance(part, str) for part in parts)
    folders = [folder / part for part in parts] if is_list else []
    if not is_list or any(part.resolve().parent != folder.resolve() for part in folders):
        raise OutputError(f"parts in {folder / CONFIG} must be subfolders of {folder}, got {parts!r}")
    return folders


def read_run(folder: Path) -> Run:
    """Read a finished run back, its seeds merged."""
    header = read_header(folder, RUN_HEADER)
    summary = _read(folder / SUMMARY, _parse_object)
    return Run(folder, header, merge_seeds(_read(folder / METRICS, _parse_lines)), summary)


def read_records(folder: Path) -> list[Record]:
    """The records of a run so far; none if it has not begun."""
    path = folder / METRICS
    return _read(path, _parse_lines, "a run") if path.exists() else []


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run's folder."""
    return _read(path, _parse_object, "a run")


def merge_seeds(records: Sequence[Record]) -> list[Record]:
    """Merge records of single seeds, by method, density and step: what differs becomes a list, seed by seed.

    None is left out of a list, and bytes are averaged: figures draw against them. Where a step was recorded
    twice, since a run was resumed, the later record counts.
    """
    if not records or "seed" not in records[0]:
        return list(records)
    merged: dict[tuple[Any, ...], dict[int, Record]] = {}
    for record in records:
        key = record["method"], record.get("density"), record["step"]
        merged.setdefault(key, {})[record["seed"]] = record
    return [_merge([by_seed[seed] for seed in sorted(by_seed)]) for by_seed in merged.values()]


def _merge(records: Sequence[Record]) -> Record:
    merged: Record = {}
    for name in records[0]:
        values = [record[name] for record in records if record.get(name) is not None]
        if all(value == values[0] for value in values):
            merged[name] = values[0] if values else None
        else:
            merged[name] = fmean(values) if name.endswith("_bytes") else values
    return merged


@contextmanager
def reading_from(folder: Path, what: str) -> Iterator[None]:
    """Turn what records that were made up or damaged lead to into an `OutputError` that names the folder."""
    try:
        yield
    except RegtopkError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise OutputError(f"folder must hold a run that can be {what}, got {folder}: {reason}") from error


def _read(path: Path, parse: Callable[[str], T], what: str = "a finished run") -> T:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = f"not JSON, {error}"
    raise OutputError(f"folder must hold {what}, but {path} cannot be read: {reason}")


def _parse_object(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"an object is expected, got {text[:40].strip()!r}")
    return content


def _parse_lines(text: str) -> list[Record]:
    """The records, each with its `CARRIED` fields; a line that a kill left torn is not read."""
    records = []
    carried: Record = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            record = _parse_object(line)
        except ValueError as error:
            raise ValueError(f"record {number}: {error}") from None
        carried |= {name: record.pop(name) for name in CARRIED if name in record}
        records.append(record | {name: value for name, value in carried.items() if value is not None})
    return records
