"""What local work costs on a machine: measured times as sums of units times seconds per unit."""

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regtopk._version import __version__
from regtopk.errors import StateError
from regtopk.lab.plan.exchange import Units, Work
from regtopk.lab.runs import write_json

Line = dict[str, float]  # seconds per unit
RECORDED = Path(__file__).with_name("gpu.json")  # the costs of a GPU, for where there is none


@dataclass(frozen=True)
class Calibration:
    """The costs of one machine, and what they were measured on."""

    machine: dict[str, Any]  # what costs depend on: processor, threads, versions
    lines: dict[str, Line]  # by the name of the work

    def seconds(self, work: Work) -> float:
        """How long some work takes; a `StateError` if it was not measured."""
        if work.line not in self.lines:
            raise StateError(f"calibration must hold the costs of {work.line!r}, got {[*self.lines]}")
        line = self.lines[work.line]
        return sum(line.get(unit, 0.0) * amount for unit, amount in work.units.items())

    @classmethod
    def read(cls, path: Path) -> "Calibration":
        """A calibration from a file; a `StateError` if it cannot be read, or is none."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            costs = [seconds for line in content["lines"].values() for seconds in line.values()]
            if not all(0 <= seconds < math.inf for seconds in costs):
                raise ValueError("a cost is negative or not finite")
            return cls(dict(content["machine"]), content["lines"])
        except OSError as error:
            raise StateError(f"calibration must be readable, but {path} is not: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(
                f"calibration must be what `regtopk plan` writes, but {path} is not: {error!r}"
            ) from error

    def write(self, path: Path) -> None:
        """Keep it in a file."""
        write_json(path, asdict(self))


def fit(points: Sequence[tuple[Units, float]]) -> Line:
    """The line, with no negative cost, that comes nearest to measured times, relative to each of them."""
    names = sorted({unit for units, _ in points for unit in units})
    times = np.array([max(seconds, 1e-9) for _, seconds in points])
    amounts = np.array([[units.get(name, 0.0) for name in names] for units, _ in points]) / times[:, None]
    scale = np.maximum(amounts.max(axis=0), 1e-300)  # units differ by many powers of ten
    kept, costs = list(range(len(names))), np.zeros(len(names))
    while kept:  # least squares, without the unit whose cost is most negative
        found, *_ = np.linalg.lstsq(amounts[:, kept] / scale[kept], np.ones(len(points)), rcond=None)
        if (found >= 0).all():
            costs[kept] = found / scale[kept]
            break
        del kept[int(found.argmin())]
    return dict(zip(names, costs.tolist(), strict=True))


def describe_machine(device: str) -> dict[str, Any]:
    """Everything that costs depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return {
        "regtopk": __version__,
        "torch": torch.__version__,
        "processor": name[1] if name else platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "num_threads": torch.get_num_threads(),
    }


def cache_path(device: str) -> Path:
    """Where this machine's calibration is kept: in $XDG_CACHE_HOME/regtopk, or ~/.cache/regtopk."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    key = hashlib.sha256(json.dumps(describe_machine(device), sort_keys=True).encode()).hexdigest()
    return Path(root) / "regtopk" / f"costs-{key[:16]}.json"
