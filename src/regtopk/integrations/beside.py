"""The state of an exchange in the folder of a framework's checkpoint: every rank writes its own part.

Frameworks save what rank 0 has. An exchange differs from rank to rank, and over slow links nobody wants to
gather it on one. `regtopk.Checkpoints` writes it whole or not at all.
"""

import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from regtopk.distributed.checkpoints.choice import choose, found_in, refuse
from regtopk.distributed.checkpoints.folder import Checkpoints
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.transport.collectives import collectives_of
from regtopk.errors import StateError, log

NAME = "regtopk"  # of the folder in the checkpoint's


def save(folder: Path, **exchanges: ExchangeBase) -> None:
    """Save exchanges, if there are any, beside what the framework has saved before. Call it on every rank."""
    if not exchanges:
        return
    with Checkpoints(folder / NAME, keep=1, on_error="raise") as checkpoints:
        checkpoints.save(max(each.num_steps for each in exchanges.values()), **exchanges)


def make_room(folder: Path) -> None:
    """Remove the state in a folder that is about to be written again. One that cannot be used is renamed."""
    collectives, state = collectives_of(None), folder / NAME
    seen, name = zip(*collectives.all_gather_objects((found_in(state), secrets.token_hex(4))), strict=True)
    if not choose(list(seen)).refused:
        shutil.rmtree(state, ignore_errors=True)  # by all ranks at once: some will find nothing
        return
    with suppress(FileNotFoundError):
        state.rename(folder / f"{NAME}-unused-{name[0]}")


def load(folder: Path, **exchanges: ExchangeBase) -> None:
    """Go on from what was saved beside a framework's checkpoint. Call it on every rank."""
    if not exchanges:
        return
    loaded = None
    if any(collectives_of(None).all_gather_objects((folder / NAME).is_dir())):  # which loading would make
        with Checkpoints(folder / NAME) as checkpoints:
            loaded = checkpoints.load(**exchanges)
    if loaded is None:
        raise StateError(
            f"checkpoint must hold the exchange's state of every rank, got {folder}, which has none in "
            f"{NAME}/: it was saved without the exchange, or a rank was killed before it had saved its part. "
            "Go on from an older checkpoint"
        )


def newest_checkpoint(folder: str | Path) -> str | None:
    """The newest `checkpoint-STEP` of a folder that all ranks have finished. Call it on every rank.

    What a killed rank has left half-written is passed over. So is what is damaged, with a warning.

    Returns:
        Its path, the same on every rank; None if there is none.

    Raises:
        ClusterError: there are other processes, and no process group to ask them yet.
        StateError: all are damaged, or a newer one has another format.
    """
    found = {path.name: found_in(path / NAME) for path in Path(folder).glob("checkpoint-*")}
    collectives = collectives_of(None)
    seen = collectives.all_gather_objects(found)
    step_of = {name: name.removeprefix("checkpoint-") for theirs in seen for name in theirs}
    names = [name for name, step in step_of.items() if step.isdecimal()]
    passed_over: list[str] = []
    for name in sorted(names, key=lambda name: int(step_of[name]), reverse=True):
        choice = choose([theirs.get(name, {}) for theirs in seen])
        passed_over += [f"{name}/{NAME}/{problem}" for problem in choice.refused]
        if choice.is_other_format:
            break
        if choice.save is not None:
            for problem in passed_over if collectives.rank == 0 else []:
                log.warning("a newer checkpoint in %s is passed over: %s", folder, problem)
            return str(Path(folder) / name)
    refuse(folder, passed_over)
    return None
