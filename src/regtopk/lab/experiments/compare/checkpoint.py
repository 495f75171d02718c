"""Where the training of a method stands, so that an interrupted comparison goes on to the same bits."""

import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch

from regtopk.lab.experiments.training.trainer import Trainer

CHECKPOINTS = "checkpoint-*.pt"
EVERY_S = 60.0  # a checkpoint is written at the first evaluation after so many seconds


class Checkpoint:
    """A file in the results folder, one for each method, so that runs of other methods leave it alone.

    Args:
        folder: of the results; all its runs share their settings.
        label: of the method's row; another row may train the same method.
        density: of the run.
        seeds: that are trained at once.
    """

    def __init__(self, folder: Path, label: str, density: float | None, seeds: Sequence[int]) -> None:
        self._path = folder / CHECKPOINTS.replace("*", sha256(label.encode()).hexdigest()[:12])
        self._run = {"density": density, "seeds": list(seeds)}
        self._saved_at = time.perf_counter()

    def load(self, trainer: Trainer) -> float:
        """Go on from the file, if it is of this run. Returns the seconds that the training had taken."""
        if not self._path.exists():
            return 0.0
        state = torch.load(self._path, map_location=trainer.models.device, weights_only=True)
        if state["run"] != self._run:
            return 0.0
        trainer.load_state_dict(state["trainer"])
        return float(state["time_s"])

    def save(self, trainer: Trainer, time_s: float) -> None:
        """Replace the file, unless the last one was written less than `EVERY_S` ago."""
        if time.perf_counter() - self._saved_at < EVERY_S:
            return
        new = self._path.with_suffix(".new")
        torch.save({"run": self._run, "trainer": trainer.state_dict(), "time_s": time_s}, new)
        new.replace(self._path)
        self._saved_at = time.perf_counter()

    def remove(self) -> None:
        """The training is done."""
        self._path.unlink(missing_ok=True)
