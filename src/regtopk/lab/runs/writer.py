"""Writing a run into its folder: one process at a time, and nothing is lost at a kill."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from regtopk.errors import OutputError, RunExistsError
from regtopk.lab.runs.reading import RUN_HEADER, read_header
from regtopk.lab.runs.run import CARRIED, CONFIG, FILES, METRICS, SUMMARY, Record


class RunWriter:
    """Writes one run into a folder, which is claimed before anything is computed.

    A folder that holds a run is refused with a `RunExistsError`, unless `force` replaces the run or `resume`
    continues it: then it must agree with the new header in the `shared` settings.
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
        self.folder, self._header = folder, dict(header)
        self.is_continued = resume and (folder / CONFIG).exists()
        # of the record before; unknown, so that it is written, where a run goes on
        self._carried: Record | None = None if self.is_continued else dict.fromkeys(CARRIED)
        if not self.is_continued:
            with writing_to(folder):
                folder.mkdir(parents=True, exist_ok=True)
            if not force:
                check_holds_no_run(folder)
        self._metrics = _open_locked(folder)
        try:
            with writing_to(folder):
                if self.is_continued:
                    old = check_same_settings(folder, header["experiment"], shared or {})
                    commands = [*old["command"].splitlines(), header["command"]]
                    self._header = {
                        **old,
                        **header,
                        "versions": old["versions"],
                        "command": "\n".join(dict.fromkeys(commands)),  # the new one stands below
                        "config": {**old["config"], **header["config"]},
                    }
                    content = (folder / METRICS).read_bytes()
                    os.truncate(folder / METRICS, content.rfind(b"\n") + 1)  # a kill can leave half a line
                else:
                    if not force:
                        check_holds_no_run(folder)  # again: another process may have finished one
                    self._metrics.truncate(0)  # not removed: it holds the lock
                    for name in set(FILES) - {METRICS}:
                        (folder / name).unlink(missing_ok=True)
                write_json(folder / CONFIG, self._header)
        except OutputError:
            self._metrics.close()
            raise

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *error: object) -> None:
        with writing_to(self.folder):  # on a full disk closing fails as the last record did
            self._metrics.close()

    def add(self, record: Record) -> None:
        """Append one record, at once on disk; numbers that are not finite are refused."""
        carried = {name: record.get(name) for name in CARRIED}
        fields = {name: value for name, value in record.items() if name not in CARRIED}
        before = self._carried
        fields |= {name: value for name, value in carried.items() if before is None or value != before[name]}
        try:
            line = json.dumps(fields, allow_nan=False)
        except ValueError:
            raise OutputError(f"records must be finite, got {record}: the run diverged") from None
        with writing_to(self.folder):
            self._metrics.write(line + "\n")
            self._metrics.flush()
        self._carried = carried

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Change settings of the header that depend on what the folder holds, now that it is locked."""
        self._header["config"] = {**self._header["config"], **settings}
        write_json(self.folder / CONFIG, self._header)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary: from now on the run counts as finished."""
        write_json(self.folder / SUMMARY, summary)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Turn errors of the file system into an `OutputError` that names the output folder."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"output folder must be writable, got {folder}: {reason}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write readable JSON, all of it or, at a kill, nothing."""
    new = path.with_name(f"{path.name}.new")
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    with writing_to(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text, encoding="utf-8")
        new.replace(path)


def check_holds_no_run(folder: Path) -> None:
    """Refuse a folder that holds a run or a part of one; an empty file of records is none."""
    for name in FILES:
        path = folder / name
        if path.exists() and (name != METRICS or path.stat().st_size > 0):
            raise RunExistsError(f"output folder must not hold a run, but {folder} holds {name}")


def check_same_settings(folder: Path, experiment: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The header of the folder's run, of the same experiment and settings, as far as it records them."""
    header = read_header(folder, RUN_HEADER)
    recorded = {**header["config"], "experiment": header["experiment"]}
    for key, value in {"experiment": experiment, **settings}.items():
        was = recorded.get(key, value)
        if was != value:
            raise OutputError(f"{key} must be {was!r} as in the run that {folder} holds, got {value!r}")
    return header


def _open_locked(folder: Path) -> TextIO:
    """Open the records to append to. Only one process writes a folder at a time; closing ends its lock."""
    with writing_to(folder):
        file = (folder / METRICS).open("a", encoding="utf-8")
    try:
        import fcntl
    except ImportError:  # not on Windows
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise OutputError(f"output folder must not be written by another process, got {folder}") from None
    return file
