"""The files of a checkpoint: what one rank writes and reads, so that a file is whole or not there.

::

    folder/step-0000000120-1a2b3c4d/     one save: its step, and the run (a start of all ranks) that made it
        shared-0.pt                      what all ranks have the same, written once for each file system
        rank-3.pt                        what only rank 3 has
        rank-3.json                      rank 3's manifest: its files' sizes and checksums, facts of the run,
                                         and a checksum of these words

A file gets a temporary name, reaches the disk, and is then renamed. The manifest comes last. So a rank's part
is there when its manifest is, and the sizes in it are those of the files. Checksums are looked at when a file
is read.
"""

import io
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple
from zlib import crc32

import torch

from regtopk.errors import StateError

FORMAT = 1
Manifest = dict[str, Any]  # what a rank says of its part


class Save(NamedTuple):
    """A moment that was saved; the greater, the newer."""

    step: int
    run: str

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"step-{self.step:010d}-{self.run}"


class _Sink:
    """A file that takes a checksum of what is written, and remembers why it could not be written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size, self.checksum = 0, 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:  # torch would say where in its own code it was
            self.error = self.error or error
            raise
        self.size += len(data)
        self.checksum = crc32(data, self.checksum)
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def write_part(folder: Path, rank: int, contents: dict[str, Any], facts: Manifest) -> None:
    """Write a rank's files, and its manifest when they are on the disk.

    Raises:
        OSError: the disk is full, say; nothing of the part is left.
    """
    path = folder / f"rank-{rank}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = {
            name: _write(folder / name, partial(torch.save, content)) for name, content in contents.items()
        }
        manifest = {"format": FORMAT, "files": files, **facts}
        text = json.dumps({**manifest, "checksum": _checksum(manifest)})
        _write(path, lambda sink: sink.write(text.encode()))
        _sync(folder.parent)
    except OSError:
        for name in (path.name, *contents):
            (folder / name).unlink(missing_ok=True)
        raise


def _checksum(manifest: Manifest) -> int:
    return crc32(json.dumps(manifest).encode())


def _write(path: Path, write: Callable[[Any], Any]) -> list[int]:
    """Write a file that is whole or not there; its size and checksum."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            sink = _Sink(file)
            try:
                write(sink)
            except RuntimeError:
                if sink.error is not None:
                    raise sink.error from None
                raise
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync(path.parent)
    return [sink.size, sink.checksum]


def _sync(folder: Path) -> None:
    """See that renamed files keep their new names after a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def saves_in(folder: Path) -> Iterator[tuple[Save, Path]]:
    """The saves of a folder, whole or not."""
    for path in sorted(folder.glob("step-*-*")):
        _, step, run = path.name.split("-", 2)
        if step.isdecimal():
            yield Save(int(step), run), path


def parts_in(folder: Path) -> dict[Save, dict[int, Manifest]]:
    """The parts that can be seen of each save, by rank: those whose files have the right sizes."""
    return {save: dict(_parts_of(path)) for save, path in saves_in(folder)}


def _parts_of(path: Path) -> Iterator[tuple[int, Manifest]]:
    for file in path.glob("rank-*.json"):
        try:
            manifest = json.loads(file.read_bytes())
            told = manifest.pop("checksum", None)  # older manifests have none
            is_whole = told in (None, _checksum(manifest)) and all(
                (path / name).stat().st_size == size for name, (size, _) in manifest["files"].items()
            )
            if is_whole and manifest["format"] == FORMAT:
                yield int(file.stem.removeprefix("rank-")), manifest
        except (OSError, ValueError, TypeError, KeyError, AttributeError):  # cut off, or being removed
            continue


def read_checked(path: Path, manifest: Manifest) -> bytes | None:
    """A file's bytes; None if it cannot be read, or is not what the manifest says."""
    size, checksum = manifest["files"][path.name]
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return data if len(data) == size and crc32(data) == checksum else None


def content_of(data: bytes) -> Any:
    """What was written, tensors on the CPU."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:  # its checksum is right: it was written so
        raise StateError(
            f"a file of the checkpoint cannot be read: {type(error).__name__}: {error}"
        ) from error
