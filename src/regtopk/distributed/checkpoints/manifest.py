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
COMMON = ("num_ranks", "file_systems", "weights", "shared")  # what all ranks of a save say alike


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

    def to_json(self) -> bytes:
        """The words of the file."""
        facts = {"format": FORMAT, **vars(self)}
        return json.dumps({**facts, "checksum": _checksum(facts)}).encode()

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
