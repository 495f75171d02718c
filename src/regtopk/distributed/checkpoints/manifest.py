"""What a rank's manifest holds: its part's files, and facts of the whole save, should other parts be lost.

It is one JSON object: "format", the fields of `Manifest`, which `folder` fills, and a checksum of all these.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from regtopk.errors import StateError

FORMAT = 1


class OtherFormatError(StateError):
    """A part was written by another version of regtopk."""


@dataclass(frozen=True)
class Manifest:
    """A rank's words on its part of a save. Ranks are numbered within the process group that saved."""

    files: dict[str, list[int]]  # by name: the size in bytes, and the CRC-32
    num_ranks: int
    file_systems: list[list[int]]  # the ranks that see one another's files
    weights: dict[str, list[float]]  # by exchange: every rank's w_n
    norms: dict[str, list[float]]  # by exchange: every rank's |e_n|
    meshes: dict[str, Any]  # by name of what is sharded: its meshes and placements
    shared: list[str]  # the names of what all ranks have the same

    def to_json(self) -> bytes:
        """The words of the file."""
        facts = {"format": FORMAT, **vars(self)}
        return json.dumps({**facts, "checksum": _checksum(facts)}).encode()


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file; refuses a part that cannot be used."""
    found = None
    try:
        facts = json.loads(path.read_bytes())
        checksum = facts.pop("checksum", None)  # older manifests have none
        is_whole = checksum in (None, _checksum(facts)) and facts["format"] == FORMAT
        found = facts.pop("format")
        manifest = Manifest(**facts)
        ranks = sorted(rank for ranks in manifest.file_systems for rank in ranks)
        is_whole = is_whole and ranks == list(range(manifest.num_ranks))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        is_whole = False
    if type(found) is int and found != FORMAT:
        raise OtherFormatError(f"{path.name} is of format {found}, this version of regtopk reads {FORMAT}")
    if not is_whole:
        raise StateError(f"{path.name} is damaged")
    for name, (size, _) in manifest.files.items():
        file = path.with_name(name)
        if not file.is_file() or file.stat().st_size != size:
            raise StateError(f"{name} is missing or cut off")
    return manifest


def _checksum(facts: dict[str, Any]) -> int:
    return crc32(json.dumps(facts).encode())
