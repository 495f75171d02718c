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

CARRIED = ("hardware", "software")  # fields that are in metrics.jsonl only where they change


@dataclass(frozen=True)
class Panel:
    """One set of axes: which fields of the records are drawn against which, one curve per method.

    Args:
        title: above the axes.
        x: field of the records; a list there has one value per seed, and their mean is drawn.
        y: field of the records; a list there has one value per seed, drawn as median and range.
        x_label, y_label: along the axes.
        where: only records with these values, or with None there, are drawn.
        log_x, log_y: logarithmic axes; values <= 0 are left out.
        marks: "line", "stems" for lengths of single steps, or "bars" for the final numbers in the summary.
        dots: a second field, drawn as circles over the curve (published points).
        x_max, y_min: where the axes end.
        mark, mark_label: a place of the x axis to mark, and its name.
    """

    title: str
    x: str
    y: str
    x_label: str
    y_label: str
    where: Mapping[str, Any] = field(default_factory=dict)
    log_x: bool = False
    log_y: bool = False
    marks: Literal["line", "stems", "bars"] = "line"
    dots: str | None = None
    x_max: float | None = None
    y_min: float | None = None
    mark: float | None = None
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
    experiment: str,
    *,
    title: str,
    about: str,
    command: str,
    config: Mapping[str, Any],
    panels: Sequence[Panel],
) -> dict[str, Any]:
    """What config.json holds for a run."""
    return {
        "experiment": experiment,
        "title": title,
        "about": about,
        "command": command,
        "config": dict(config),
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
