"""Which save to go on from, by the manifests that the ranks see, and which ones stop a run.

A save that cannot be used was either never complete, because a rank was killed while it wrote: it does not
count. Or it was complete once, and is damaged or of another format: no run may start over as if it were not
there, nor remove it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from regtopk.distributed.checkpoints.files import Manifest, OtherFormatError, Save, read_manifest, saves_in
from regtopk.errors import StateError

_COMMON = ("num_ranks", "file_systems", "weights", "shared")  # what all ranks of a save say alike


@dataclass
class Seen:
    """What is seen of a save, by one rank or by all."""

    parts: dict[int, Manifest] = field(default_factory=dict)  # those that can be used, by rank
    unusable: set[str] = field(default_factory=set)  # why others that were finished cannot be
    is_other_format: bool = False  # whether another version has written one

    @property
    def facts(self) -> Manifest:
        """Any of the manifests, for what all say alike."""
        return next(iter(self.parts.values()))

    def compare_parts(self) -> None:
        """Make no use of parts that differ in what all ranks say alike."""
        for fact in _COMMON if self.parts else ():
            said = getattr(self.facts, fact)
            is_alike = not (fact == "weights" and self.facts.meshes)  # which are the replicas' of a shard
            others = [rank for rank, part in sorted(self.parts.items()) if getattr(part, fact) != said]
            if others and is_alike:
                self.unusable.add(f"the manifests of ranks {[self.facts.rank, *others]} differ in {fact}")
                self.parts = {}
                return

    @property
    def missing(self) -> list[int]:
        """The ranks whose parts are missing."""
        return sorted(set(range(self.facts.num_ranks)) - set(self.parts))

    @property
    def shared_files(self) -> list[str]:
        """The files that hold what all ranks have the same: any of them will do."""
        names = [name for _, part in sorted(self.parts.items()) for name in part.files]
        return [name for name in names if name.startswith("shared-")]

    @property
    def lack(self) -> str:
        """What is not there, or cannot be used."""
        if self.unusable or not self.parts:
            return ", ".join(sorted(self.unusable)) or "no rank has finished its part"
        return f"parts of ranks {self.missing} are missing"

    @property
    def is_usable(self) -> bool:
        """Whether a run can go on from the save.

        Parts may be missing because a rank was killed while it wrote, which makes a save useless, or because
        a disk was lost. So only all parts of a file system may be missing, not some.
        """
        if not self.parts:
            return False
        facts, gone = self.facts, set(self.missing)
        if any(gone & set(ranks) and not gone >= set(ranks) for ranks in facts.file_systems):
            return False
        if gone and facts.meshes:  # a sharded model needs all parts
            return False
        return not facts.shared or bool(self.shared_files)


def found_in(folder: Path) -> dict[Save, Seen]:
    """What this rank sees of each save."""
    saves = {}
    for save in saves_in(folder):
        found = saves[save] = Seen()
        for path in (folder / save.folder).glob("rank-*.json"):
            if not path.stem.removeprefix("rank-").isdecimal():
                continue
            try:
                manifest = read_manifest(path, save.step, save.run)
                found.parts[manifest.rank] = manifest
            except StateError as reason:
                found.unusable.add(str(reason))
                found.is_other_format |= isinstance(reason, OtherFormatError)
    return saves


class Choice(NamedTuple):
    """A save to go on from, and what becomes of the others."""

    save: Save | None
    found: Seen
    usable: list[Save]  # up to the chosen one
    removable: set[Save]  # all that can be used, and all that were never complete
    skipped: list[str]  # why newer ones are not used
    refused: list[str]  # why nobody may go on: what must not be passed over
    is_other_format: bool  # whether one of these is


def choose(seen: list[Mapping[Save, Seen]], damaged: Collection[Save] = ()) -> Choice:
    """The newest complete save; without one, that with the fewest missing parts.

    `seen` is what each rank sees; in `damaged` saves a file has a wrong checksum.
    """
    saves = {save: Seen() for save in sorted({save for theirs in seen for save in theirs})}
    for theirs in seen:
        for save, found in theirs.items():
            saves[save].parts |= found.parts
            saves[save].unusable |= found.unusable
            saves[save].is_other_format |= found.is_other_format
    for found in saves.values():
        found.compare_parts()
    saves |= {save: Seen(unusable={"a file has a wrong checksum"}) for save in damaged}
    usable = [save for save, found in saves.items() if found.is_usable]
    best = min(usable, key=lambda save: (len(saves[save].missing), -save.step), default=None)
    newer = {save: found for save, found in saves.items() if best is None or save.step > best.step}
    # the ranks begin a save when the one before is complete: only the last of a run can be unfinished
    last_of_run = {save.run: save for save in saves}.values()
    unfinished = {save for save in last_of_run if save not in usable and not saves[save].unusable}
    refused = {
        save: found
        for save, found in newer.items()
        if found.is_other_format or (best is None and save not in unfinished)
    }
    return Choice(
        best,
        saves[best] if best else Seen(),
        usable=[save for save in usable if save not in newer],
        removable={*usable, *unfinished},
        skipped=[
            f"checkpoint of step {save.step} is skipped ({save.folder}): {found.lack}"
            for save, found in newer.items()
        ],
        refused=[f"{save.folder}: {found.lack}" for save, found in refused.items()],
        is_other_format=any(found.is_other_format for found in refused.values()),
    )


def refuse(folder: str | Path, reasons: list[str]) -> None:
    """Stop a run that would pass over saves, if there are reasons to."""
    if reasons:
        raise StateError(
            f"checkpoints in {folder} cannot be used: {'; '.join(reasons)}. None was changed. Use the "
            "regtopk that saved them, mend them, or move them to another folder to go on without them"
        )
