"""Trainings in the middle, so that an interrupted run goes on to the same bits: one file for each method."""

import pickle
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from regtopk.errors import OutputError
from regtopk.lab.experiments.training.trainer import Trainer

_PATTERN = "checkpoint-*"  # one for each method, so that a slice of others leaves them


class Checkpoints:
    """The checkpoints in a results folder.

    Args:
        folder: of the results.
        settings: what all of its runs share; a checkpoint of other settings is not used.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._settings = dict(settings)

    def clear(self) -> None:
        """Remove all of them."""
        for path in self._folder.glob(_PATTERN):
            path.unlink()

    def save(self, trainer: Trainer, method: str, time_s: float) -> None:
        """Keep where a training stands, and how long it took to get there."""
        state = {"run": self._run(trainer, method), "time_s": time_s, **trainer.state_dict()}
        path = self._path(method)
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, trainer: Trainer, method: str) -> float:
        """Go on from the checkpoint of this run, if there is one. Returns the time that it had taken."""
        path = self._path(method)
        if not path.exists():
            return 0.0
        try:
            state = torch.load(path, map_location=trainer.models.device, weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise OutputError(
                f"checkpoint must be whole, but {path} cannot be read: {reason}; remove it to start that "
                "run over"
            ) from error
        if state["run"] != self._run(trainer, method):
            return 0.0
        trainer.load_state_dict(state)
        return float(state["time_s"])

    def remove(self, method: str) -> None:
        """Remove the checkpoint of a finished training."""
        self._path(method).unlink(missing_ok=True)

    def _path(self, method: str) -> Path:
        return self._folder / f"{_PATTERN[:-1]}{sha256(method.encode()).hexdigest()[:12]}.pt"

    def _run(self, trainer: Trainer, method: str) -> dict[str, Any]:
        return {**self._settings, "method": method, "seeds": list(trainer.task.seeds)}
