"""Calibrations on disk: one file for each machine, number of workers on it, and version."""

import hashlib
import json
import logging
import os
from pathlib import Path

from regtopk.errors import OutputError, StateError
from regtopk.plan.calibrate import Machine, Progress, calibrate
from regtopk.plan.costs import Calibration


def cache_path(machine: Machine) -> Path:
    """Where a machine's calibration is kept: in $XDG_CACHE_HOME/regtopk, or ~/.cache/regtopk."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    key = hashlib.sha256(json.dumps(machine.describe(), sort_keys=True).encode()).hexdigest()
    return Path(root) / "regtopk" / f"calibration-{key[:16]}.json"


def read(path: Path) -> Calibration:
    """A calibration from a file.

    Raises:
        StateError: it cannot be read, or is none.
    """
    try:
        return Calibration.from_json(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise StateError(f"calibration must be readable, but {path} is not: {error.strerror}") from error


def write(calibration: Calibration, path: Path) -> None:
    """Keep a calibration.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(calibration.to_json(), indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise OutputError(f"calibration must be writable, but {path} is not: {error.strerror}") from error


def calibration_of(machine: Machine, path: Path, *, again: bool, progress: Progress) -> Calibration:
    """The calibration in a file; measured and kept there if there is none, or again if told.

    Where it cannot be kept that is said, and it is used all the same.
    """
    if not again and path.exists():
        return read(path)
    calibration = calibrate(machine, progress)
    try:
        write(calibration, path)
    except OutputError as error:
        logging.getLogger("regtopk").warning("%s: the next plan measures again", error)
    return calibration
