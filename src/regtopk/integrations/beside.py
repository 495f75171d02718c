"""The state of an exchange in the folder of a framework's checkpoint: every rank writes its own part.

Frameworks save what rank 0 has. An exchange differs from rank to rank, and over the slow links that it is
for nobody wants to gather it on one. `regtopk.Checkpoints` writes it whole or not at all.
"""

import re
import shutil
from pathlib import Path

from regtopk.distributed.checkpoints.choice import choose
from regtopk.distributed.checkpoints.files import parts_in
from regtopk.distributed.checkpoints.folder import Checkpoints
from regtopk.distributed.steps.base import ExchangeBase
from regtopk.distributed.transport.collectives import Alone, Collectives, group_or_default, is_one_process
from regtopk.errors import StateError

NAME = "regtopk"  # of the folder in the checkpoint's


def save(folder: Path, **exchanges: ExchangeBase) -> None:
    """Save them beside what the framework has saved before. Call it on every rank.

    Raises:
        OutputError: a rank could not write.
    """
    with Checkpoints(folder / NAME, keep=1, on_error="raise") as checkpoints:
        checkpoints.save(max(each.num_steps for each in exchanges.values()), **exchanges)


def forget(folder: Path) -> None:
    """Drop what a folder holds that is about to be written again: it would not fit the rest."""
    shutil.rmtree(folder / NAME, ignore_errors=True)  # by all ranks at once: some will find nothing


def load(folder: Path, **exchanges: ExchangeBase) -> None:
    """Go on from what was saved beside a framework's checkpoint. Call it on every rank.

    On as many ranks as before training continues bit for bit; on others as `regtopk.Checkpoints` says.

    Raises:
        StateError: there is none, not all ranks had written theirs, or it does not fit.
    """
    loaded, (first, *_) = None, exchanges.values()
    if any(first._collectives.all_gather_objects((folder / NAME).is_dir())):  # which loading would make
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

    A rank that is killed while a checkpoint is written leaves a folder that cannot be gone on from.

    Returns:
        Its path, the same on every rank; None if there is none.

    Raises:
        ClusterError: there are other processes, and no process group to ask them yet.
    """
    collectives = Alone() if is_one_process() else Collectives(group_or_default(None))
    found = {
        path.name: parts_in(path / NAME)
        for path in Path(folder).glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d+", path.name)
    }
    seen = collectives.all_gather_objects(found)
    names = {name for theirs in seen for name in theirs}
    for name in sorted(names, key=lambda name: int(name.rpartition("-")[2]), reverse=True):
        if choose([theirs.get(name, {}) for theirs in seen], set()).save is not None:
            return str(Path(folder) / name)
    return None
