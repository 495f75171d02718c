"""The files of a checkpoint: what one rank writes and reads, so that a file is whole or not there.

::

    folder/step-0000000120-1a2b3c4d/     one save: its step, and the run (a start of all ranks) that made it
        shared-0.pt                      what all ranks have the same, written once for each file system
        rank-3.pt                        what only rank 3 has
        rank-3.json                      rank 3's manifest

The manifest comes last. So a part whose manifest is there was finished, and a file that is missing or of
another size then is damage. Checksums are compared when a file is read.
"""

import io
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch

from regtopk.distributed.checkpoints.manifest import Manifest


class Save(NamedTuple):
    """A moment that was saved; the greater, the newer."""

    step: int
    run: str

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"step-{self.step:010d}-{self.run}"


def write_part(folder: Path, rank: int, contents: dict[str, Any], facts: Manifest) -> None:
    """Write a rank's files, by name, and its manifest when they are on the disk: else it does not count."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        name: write_whole(folder / name, partial(torch.save, content)) for name, content in contents.items()
    }
    text = replace(facts, files=files).to_json()
    write_whole(folder / f"rank-{rank}.json", lambda file: file.write(text))
    _sync(folder.parent)


class _ChecksummedFile(io.BufferedWriter):
    """A file that takes a checksum of what is written."""

    checksum = 0

    def write(self, data: Any) -> int:
        self.checksum = crc32(data, self.checksum)
        return super().write(data)


def write_whole(path: Path, write: Callable[[Any], Any]) -> list[int]:
    """Write a file that is whole or not there; its size and checksum."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with _ChecksummedFile(io.FileIO(temporary, "wb")) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            written = [file.tell(), file.checksum]
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch would say where in its own code it was
        raise
    _sync(path.parent)
    return written


def _sync(folder: Path) -> None:
    """See that renamed files keep their new names after a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def saves_in(folder: Path) -> list[Save]:
    """The saves of a folder, whole or not, the newest last."""
    names = (path.name.split("-", 2) for path in folder.glob("step-*-*"))
    return sorted(Save(int(step), run) for _, step, run in names if step.isdecimal())


def remove(path: Path) -> None:
    """Remove a save. It gets another name first: killed on the way, it is not taken for a damaged one."""
    removed = path.with_name(f"removed-{path.name.removeprefix('removed-')}")
    with suppress(OSError):
        path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def read_checked(path: Path, size: int, checksum: int) -> bytes:
    """A file's bytes; none if it cannot be read, or has another size or checksum."""
    try:
        data = path.read_bytes()
    except OSError:
        return b""
    return data if len(data) == size and crc32(data) == checksum else b""
