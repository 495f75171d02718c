"""Which checkpoint to go on from, by the manifests that the ranks see, and what missing parts take along."""

from collections.abc import Mapping
from typing import NamedTuple

from regtopk.distributed.checkpoints.files import Manifest, Save

Parts = dict[int, Manifest]  # by rank


class Choice(NamedTuple):
    """A save to go on from, the parts of it that are there, why newer ones were skipped, and older ones."""

    save: Save | None
    parts: Parts
    skipped: list[str]
    older: list[Save]  # that one could go on from too


def choose(seen: list[Mapping[Save, Parts]], damaged: set[Save]) -> Choice:
    """The newest complete save; without one, that with the fewest missing parts.

    Parts may be missing because a rank was killed while it wrote, which makes a save useless, or because a
    disk was lost. So only all parts of a file system may be missing, not some.

    Args:
        seen: what each rank sees.
        damaged: what turned out to be so.
    """
    saves: dict[Save, Parts] = {}
    for theirs in seen:
        for save, parts in theirs.items():
            saves[save] = {**saves.get(save, {}), **parts}
    problems = {
        save: "it is damaged" if save in damaged else _problem(parts) for save, parts in saves.items()
    }
    usable = [save for save, problem in problems.items() if problem is None]
    best = min(usable, key=lambda save: (len(missing(saves[save])), -save.step, save.run), default=None)
    skipped = [
        f"checkpoint of step {save.step} is skipped ({save.folder}): {problem or told_missing(saves[save])}"
        for save, problem in sorted(problems.items())
        if best is None or save.step > best.step
    ]
    older = sorted(save for save in usable if best is not None and save.step < best.step)
    return Choice(best, saves[best] if best else {}, skipped, older)


def _problem(parts: Parts) -> str | None:
    """Why nobody can go on from these parts of a save; None: they can."""
    if not parts:
        return "no part of it is whole"
    facts, gone = _facts(parts), set(missing(parts))
    for ranks in facts["file_systems"]:
        if gone & set(ranks) not in (set(), set(ranks)):
            return told_missing(parts)
    if gone and facts["meshes"]:
        return f"{told_missing(parts)}, and a sharded model needs all"
    if facts["shared"] and not shared_files(parts):
        return f"{told_missing(parts)}, and with them what all ranks share"
    return None


def _facts(parts: Parts) -> Manifest:
    return next(iter(parts.values()))


def missing(parts: Parts) -> list[int]:
    """The ranks whose parts are missing."""
    return sorted(set(range(_facts(parts)["num_ranks"])) - set(parts))


def told_missing(parts: Parts) -> str:
    """In words."""
    return f"parts of ranks {missing(parts)} are missing"


def shared_files(parts: Parts) -> list[str]:
    """The files that hold what all ranks have the same: any of them will do."""
    names = [name for rank in sorted(parts) for name in parts[rank]["files"]]
    return [name for name in names if name.startswith("shared-")]


def lost_residual(parts: Parts, exchange: str) -> tuple[float, float]:
    """Of an exchange, the sum of w_n |e_n| over the missing ranks n, and its share of that of all ranks."""
    facts = _facts(parts)
    norms = [w * norm for w, norm in zip(facts["weights"][exchange], facts["norms"][exchange], strict=True)]
    lost = sum(norms[rank] for rank in missing(parts))
    return lost, lost / sum(norms) if lost else 0.0
