"""Which save to go on from, by the manifests that the ranks see, and which ones stop a run.

A save that cannot be used was either never complete, because a rank was killed while it wrote: it does not
count. Or it was complete once, and is damaged or of another format: no run may start over as if it were not
there, nor remove it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from regtopk.distributed.checkpoints.files import Parts, Save
from regtopk.distributed.checkpoints.manifest import Manifest, Unusable
from regtopk.errors import StateError

Whole = dict[int, Manifest]  # the parts of a save that can be used, by rank


class Choice(NamedTuple):
    """A save to go on from, and what becomes of the others."""

    save: Save | None
    parts: Whole
    usable: list[Save]  # up to the chosen one
    removable: set[Save]  # all that can be used, and all that were never complete
    skipped: list[str]  # why newer ones are not used
    refused: list[str]  # why nobody may go on: what must not be passed over
    is_other_format: bool  # whether one of these is


def refuse(folder: str | Path, reasons: list[str]) -> None:
    """Stop a run that would pass over saves, if there are reasons to."""
    if reasons:
        raise StateError(
            f"checkpoints in {folder} cannot be used: {'; '.join(reasons)}. None was changed. Use the "
            "regtopk that saved them, mend them, or move them to another folder to go on without them"
        )


def choose(seen: list[Mapping[Save, Parts]], damaged: set[Save]) -> Choice:
    """The newest complete save; without one, that with the fewest missing parts.

    Parts may be missing because a rank was killed while it wrote, which makes a save useless, or because a
    disk was lost. So only all parts of a file system may be missing, not some.

    Args:
        seen: what each rank sees.
        damaged: the saves in which a file has a wrong checksum.
    """
    saves: dict[Save, Parts] = {}
    for theirs in seen:
        for save, parts in theirs.items():
            saves[save] = {**saves.get(save, {}), **parts}
    wholes = {save: whole(parts) for save, parts in saves.items()}
    problems = {save: _problem(parts) for save, parts in sorted(saves.items())}
    problems |= {save: "a file has a wrong checksum" for save in damaged}
    usable = [save for save, problem in problems.items() if problem is None]
    best = min(usable, key=lambda save: (len(missing(wholes[save])), -save.step, save.run), default=None)
    newer = [save for save in problems if best is None or save.step > best.step]
    # the ranks begin a save when the one before is complete: only the last of a run can be unfinished
    last_of_run = {save.run: save for save in problems}
    unfinished = {
        save
        for save in set(last_of_run.values()) - {*usable, *damaged}
        if len(wholes[save]) == len(saves[save])
    }
    refused = [
        save for save in newer if (best is None and save not in unfinished) or _is_other_format(saves[save])
    ]
    told = {save: problem or told_missing(wholes[save]) for save, problem in problems.items()}
    return Choice(
        best,
        wholes[best] if best else {},
        usable=[save for save in usable if save not in newer],
        removable={*usable, *unfinished},
        skipped=[f"checkpoint of step {s.step} is skipped ({s.folder}): {told[s]}" for s in newer],
        refused=[f"{save.folder}: {told[save]}" for save in refused],
        is_other_format=any(_is_other_format(saves[save]) for save in refused),
    )


def whole(parts: Parts) -> Whole:
    """The parts that can be used."""
    return {rank: part for rank, part in parts.items() if isinstance(part, Manifest)}


def _is_other_format(parts: Parts) -> bool:
    return any(isinstance(part, Unusable) and part.is_other_format for part in parts.values())


def _problem(parts: Parts) -> str | None:
    """Why nobody can go on from a save; None: they can."""
    unusable = ", ".join(part.reason for _, part in sorted(parts.items()) if isinstance(part, Unusable))
    usable = whole(parts)
    if not usable:
        return unusable or "no rank has finished its part"
    facts, gone, told = _facts(usable), set(missing(usable)), unusable or told_missing(usable)
    for ranks in facts.file_systems:
        if gone & set(ranks) not in (set(), set(ranks)):
            return told
    if gone and facts.meshes:
        return f"{told}, and a sharded model needs all parts"
    if facts.shared and not shared_files(usable):
        return f"{told}, and with them what all ranks share"
    return None


def _facts(parts: Whole) -> Manifest:
    return next(iter(parts.values()))


def missing(parts: Whole) -> list[int]:
    """The ranks whose parts are missing."""
    return sorted(set(range(_facts(parts).num_ranks)) - set(parts))


def told_missing(parts: Whole) -> str:
    """In words."""
    return f"parts of ranks {missing(parts)} are missing"


def shared_files(parts: Whole) -> list[str]:
    """The files that hold what all ranks have the same: any of them will do."""
    names = [name for rank in sorted(parts) for name in parts[rank].files]
    return [name for name in names if name.startswith("shared-")]


def lost_residual(parts: Whole, exchange: str) -> tuple[float, float]:
    """Of an exchange, the sum of w_n |e_n| over the missing ranks n, and its share of that of all ranks."""
    facts = _facts(parts)
    norms = [w * norm for w, norm in zip(facts.weights[exchange], facts.norms[exchange], strict=True)]
    lost = sum(norms[rank] for rank in missing(parts))
    return lost, lost / sum(norms) if lost else 0.0
