"""Writing a run into its folder (`regtopk.runs`): one process at a time, and nothing lost at a kill."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from regtopk.errors import OutputError
from regtopk.runs import CONFIG, FILES, METRICS, SUMMARY, Record, read_header, write_json


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
        self.folder = folder
        self.is_continued = resume and (folder / CONFIG).exists()
        if not self.is_continued:
            _check_free(folder, force=force)
        self._metrics = _open_locked(folder)
        try:
            self._header = self._begin(header, force, shared or {})
        except OutputError:
            self._metrics.close()
            raise
        write_json(folder / CONFIG, self._header)

    def _begin(self, header: Mapping[str, Any], force: bool, shared: Mapping[str, Any]) -> dict[str, Any]:
        """With the folder to ourselves: go on with what is there, or clear it. Returns the header."""
        if self.is_continued:
            continued = _continued(self.folder, header, shared)
            _drop_torn_line_(self.folder / METRICS)
            return continued
        _check_free(self.folder, force=force)  # again: another process may have finished one
        self._metrics.truncate(0)  # not removed: it holds the lock
        for name in FILES:
            if name != METRICS:
                (self.folder / name).unlink(missing_ok=True)
        return dict(header)

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


def _open_locked(folder: Path) -> TextIO:
    """The records, to append to. Only one process writes a folder at a time; the lock goes with it."""
    try:
        file = (folder / METRICS).open("a", encoding="utf-8")
    except OSError as error:
        raise _not_writable(folder, error) from error
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


def check_holds_no_run(folder: Path) -> None:
    """Refuse a folder that holds a run, or a part of one; records that never began are none."""
    for name in FILES:
        path = folder / name
        if path.exists() and (name != METRICS or path.stat().st_size > 0):
            raise OutputError(
                f"output folder must not hold a run, but {folder} holds {name}: "
                "choose another --out, go on with --resume (fig3), or replace it with --force"
            )


def _check_free(folder: Path, *, force: bool) -> None:
    """Make the folder, and make sure that it can be written and holds no run (or may lose it)."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not force:
            check_holds_no_run(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(folder, error) from error


def claim_folder(folder: Path, *, force: bool) -> None:
    """Make a folder for the parts of a run, free of any other (or remove that)."""
    _check_free(folder, force=force)
    if (folder / METRICS).exists():
        _open_locked(folder).close()  # a run that is still being written is not replaced
    for name in FILES:
        (folder / name).unlink(missing_ok=True)


def _not_writable(folder: Path, error: OSError) -> OutputError:
    return OutputError(f"output folder must be writable, got {folder}: {error.strerror or error}")
