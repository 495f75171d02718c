"""The files of a checkpoint: what one rank writes and reads, so that a file is whole or not there.

::

    folder/step-0000000120-1a2b3c4d/     one save: its step, and the run (a start of all ranks) that made it
        shared-0.pt                      what all ranks have the same, written once for each file system
        rank-3.pt                        what only rank 3 has
        rank-3.json                      rank 3's manifest

The manifest comes last. So a part whose manifest is there was finished, and a file that is missing or of
another size then is damage. Checksums are compared when a file is read.

A manifest is one JSON object: "format", the fields of `Manifest`, which `folder` fills, and a checksum of all
these. It has facts of the whole save, should other parts be lost.
"""

import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch

from regtopk.errors import StateError

FORMAT = 1


class Save(NamedTuple):
    """A moment that was saved; the greater, the newer."""

    step: int
    run: str

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"step-{self.step:010d}-{self.run}"


class OtherFormatError(StateError):
    """A part was written by another version of regtopk."""


@dataclass(frozen=True)
class Manifest:
    """A rank's words on its part of a save. Ranks are numbered within the process group that saved."""

    step: int  # of the save
    run: str  # the start of all ranks that made it
    rank: int  # whose part it is
    files: dict[str, list[int]]  # by name: the size in bytes, and the CRC-32
    num_ranks: int
    file_systems: list[list[int]]  # the ranks that see one another's files
    weights: dict[str, list[float]]  # by exchange: every rank's w_n
    norms: dict[str, list[float]]  # by exchange: every rank's |e_n|
    meshes: dict[str, Any]  # by name of what is sharded: its meshes and placements
    shared: list[str]  # the names of what all ranks have the same

    def is_possible(self) -> bool:
        """Whether the facts go together; what is of another kind may raise any error."""
        n, ranks = self.num_ranks, [rank for ranks in self.file_systems for rank in ranks]
        of_ranks = [*self.weights.values(), *self.norms.values()]
        own = {f"rank-{self.rank}.pt"}
        return (
            type(n) is int
            and n == len(ranks)
            and sorted(ranks) == list(range(n))
            and self.rank in ranks
            and own <= self.files.keys() <= own | {f"shared-{self.rank}.pt"}
            and all(type(number) is int for pair in self.files.values() for number in pair)
            and self.weights.keys() == self.norms.keys()
            and all(len(each) == n or self.meshes for each in of_ranks)  # of a sharded model: the replicas'
            and all(isinstance(x, (int, float)) for each in of_ranks for x in each)
            and isinstance(self.meshes, dict)
            and all(isinstance(name, str) for name in self.shared)
        )


def write_part(folder: Path, rank: int, contents: dict[str, Any], facts: Manifest) -> None:
    """Write a rank's files, by name, and its manifest when they are on the disk: else it does not count."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        name: write_whole(folder / name, partial(torch.save, content)) for name, content in contents.items()
    }
    words = {"format": FORMAT, **vars(replace(facts, files=files))}
    text = json.dumps({**words, "checksum": _checksum(words)}).encode()
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


def read_manifest(path: Path, step: int, run: str) -> Manifest:
    """The manifest in a file of a save; refuses a part that cannot be used, or is of another save."""
    found, rank = FORMAT, int(path.stem.removeprefix("rank-"))
    try:
        facts = json.loads(path.read_bytes())
        is_whole = facts.pop("checksum", None) == _checksum(facts)
        found = facts.pop("format")
        manifest = Manifest(**facts)
        is_whole = is_whole and manifest.is_possible()
        sizes = {name: size for name, (size, _) in manifest.files.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_whole = False
    if type(found) is not int or found != FORMAT:
        raise OtherFormatError(f"{path.name} is of format {found!r}, this version of regtopk reads {FORMAT}")
    if not is_whole:
        raise StateError(f"{path.name} is damaged")
    if (manifest.step, manifest.run, manifest.rank) != (step, run, rank):
        theirs = f"rank {manifest.rank} at step {manifest.step} of run {manifest.run}"
        raise StateError(f"{path.name} is of another save: of {theirs}")
    for name, size in sizes.items():
        file = path.with_name(name)
        if not file.is_file() or file.stat().st_size != size:
            raise StateError(f"{name} is missing or cut off")
    return manifest


def _checksum(facts: dict[str, Any]) -> int:
    return crc32(json.dumps(facts).encode())
