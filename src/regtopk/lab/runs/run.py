"""What a run consists of: its header, its records, and the panels of its figure."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from regtopk._version import __version__

Record = dict[str, Any]

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"
FIGURE_PNG, FIGURE_SVG, PAGE = "figure.png", "figure.svg", "index.html"
FILES = (CONFIG, METRICS, SUMMARY, FIGURE_PNG, FIGURE_SVG, PAGE)

CARRIED = ("hardware", "software", "search")  # fields that are in metrics.jsonl only where they change


@dataclass(frozen=True)
class Panel:
    """One set of axes: which fields of the records are drawn against which, one curve per method."""

    title: str
    x: str  # field of the records, a number
    y: str  # field of the records; a list there has one value per seed, drawn as median and range
    x_label: str
    y_label: str
    where: Mapping[str, Any] = field(default_factory=dict)  # what a drawn record has there, if not None
    log_x: bool = False
    log_y: bool = False
    marks: Literal["line", "stems", "bars"] = "line"  # stems: of single steps; bars: the summary's numbers
    dots: str | None = None  # a second field, drawn as circles over the curve (published points)
    x_max: float | None = None
    y_min: float | None = None
    mark: float | None = None  # a place of the x axis
    mark_label: str = ""


@dataclass(frozen=True)
class Run:
    """A finished run, as read back."""

    folder: Path
    header: dict[str, Any]
    records: list[Record]
    summary: dict[str, Any]

    @property
    def panels(self) -> list[Panel]:
        """The panels of its figure."""
        return [Panel(**panel) for panel in self.header["panels"]]


def make_header(
    experiment: str, *, title: str, about: str, command: str, config: Record, panels: Sequence[Panel]
) -> Record:
    """What config.json holds for a run."""
    return {
        "experiment": experiment,
        "title": title,
        "about": about,
        "command": command,
        "config": config,
        "versions": versions(),
        "panels": [asdict(panel) for panel in panels],
    }


def versions() -> dict[str, str]:
    """The versions and the machine that the numbers were made with."""
    return {
        "regtopk": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
