"""What a rank's manifest holds: its part's files, and facts of the whole save, should other parts be lost.

It is one JSON object: "format", the fields of `Manifest`, and a checksum of all these words.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

FORMAT = 1


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


class Unusable(NamedTuple):
    """Why a part that was finished cannot be used."""

    reason: str
    is_other_format: bool = False


def read_manifest(path: Path) -> Manifest | Unusable:
    """The manifest in a file, or why it cannot be used."""
    try:
        facts = json.loads(path.read_bytes())
        checksum = facts.pop("checksum", None)  # older manifests have none
        found = facts.pop("format")
        if type(found) is int and found != FORMAT:
            return Unusable(f"{path.name} is of format {found}, this version of regtopk reads {FORMAT}", True)
        if checksum in (None, _checksum({"format": found, **facts})) and found == FORMAT:
            manifest = Manifest(**facts)
            members = [rank for ranks in manifest.file_systems for rank in ranks]
            if len(members) == manifest.num_ranks and sorted(members) == list(range(len(members))):
                return manifest
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return Unusable(f"{path.name} is damaged")


def _checksum(facts: dict[str, Any]) -> int:
    return crc32(json.dumps(facts).encode())
