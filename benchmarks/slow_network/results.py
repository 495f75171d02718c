"""The recorded file: rows of all runs so far, a newer row in place of an older one of the same settings."""

import json
import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from regtopk.lab.plan.units import format_bandwidth, format_time

Row = dict[str, Any]
KINDS = ("steps", "time_to_accuracy")
SETTINGS = (
    "workers",
    "bandwidth_bits_per_s",
    "latency_s",
    "params",
    "method",
    "density",
    "value_code",
    "collective",
    "lr",
    "target",
    "seed",
    "batch_size",
    "stretch",
    "shaper",
)
HEADER_BYTES = 66  # Ethernet 14, IPv4 20, TCP 32 with time stamps
SEGMENT_BYTES = 1448  # of payload in a frame of 1,500 bytes


class Results:
    """Rows by kind, kept on disk as they come.

    Args:
        path: the JSON file, read if it is there; None keeps nothing.
        command: that makes the new rows.
        kinds: of rows that the file holds.
    """

    def __init__(self, path: Path | None, command: str, kinds: tuple[str, ...] = KINDS) -> None:
        self.path = path
        self.content: dict[str, Any] = {"command": "", "hardware": "", "torch": "", "date": ""}
        self.content |= {kind: [] for kind in kinds}
        if path is not None and path.exists():
            self.content = json.loads(path.read_text(encoding="utf-8"))
        self.command = command

    def add(self, kind: str, row: Row) -> None:
        """Keep a row, and write the file."""
        commands = self.content["command"].split(" && ") if self.content["command"] else []
        self.content |= {
            "command": " && ".join(dict.fromkeys([*commands, self.command])),
            "hardware": hardware(),
            "torch": torch.__version__,
            "date": datetime.now(timezone.utc).date().isoformat(),
        }
        rows = [other for other in self.content[kind] if settings(other) != settings(row)]
        self.content[kind] = sorted([*rows, row], key=_order)
        self.write()

    def write(self) -> None:
        """Keep the file up to date."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_suffix(".part")
            beside.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
            beside.replace(self.path)


def settings(row: Row) -> tuple[Any, ...]:
    """What a row was measured on."""
    return tuple(row.get(name) for name in SETTINGS)


def _order(row: Row) -> tuple[Any, ...]:
    """By link, slowest first and unshaped last; in a link as the rows came."""
    return row["workers"], row["latency_s"], row["bandwidth_bits_per_s"] or float("inf")


def hardware() -> str:
    """The machine, in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({processor()}), {memory:.0f} GiB, Linux {platform.release()}"


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def with_headers(sent_bytes: float, received_bytes: float) -> float:
    """Bytes an interface should send: payload in full frames, and an acknowledgement of every second one."""
    return sent_bytes + HEADER_BYTES * (sent_bytes / SEGMENT_BYTES + received_bytes / SEGMENT_BYTES / 2)


def describe(row: Row) -> str:
    """A method in words."""
    parts = [row["method"]]
    if row["density"] is not None:
        parts.append(f"{100 * row['density']:g} %")
        parts.append(row["value_code"])
    if row["collective"] == "split":
        parts.append("split")
    return ", ".join(parts)


def step_table(rows: list[Row]) -> str:
    """Step times as a Markdown table."""
    lines = [
        "| workers | link | method | step | over no hook | steps | sent | at the interface |",
        "|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        link = row["bandwidth_bits_per_s"]
        cells = [
            str(row["workers"]),
            "unshaped" if link is None else format_bandwidth(link),
            describe(row),
            format_time(row["step_s"]),
            _speedup(row, rows),
            str(len(row["step_s_all"])),
            f"{row['sent_bytes'] / 1e3:,.1f} kB",
            f"{row['interface_sent_bytes'] / max(row['sent_bytes'], 1):.3f}",
        ]
        if row["latency_s"]:
            cells[1] += f" + {format_time(row['latency_s'])}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _speedup(row: Row, rows: list[Row]) -> str:
    """How many times faster than DDP without a hook on the same link, if that was measured."""
    same = ("workers", "bandwidth_bits_per_s", "latency_s", "params")
    for other in rows:
        if other["method"] == "dense" and all(other[name] == row[name] for name in same):
            return f"{other['step_s'] / row['step_s']:.2f} x"
    return ""


def accuracy_table(rows: list[Row]) -> str:
    """Times to accuracy on shaped links as a Markdown table."""
    lines = [
        "| workers | link | method | learning rate | target | reached after | steps | faster than no hook |",
        "|---:|---|---|---:|---:|---:|---:|---:|",
    ]
    measured = [row for row in rows if row["bandwidth_bits_per_s"] is not None]
    for row in measured:
        reached = row["reached_s"]
        dense = [r["reached_s"] for r in measured if r["method"] == "dense" and _same_race(r, row)]
        cells = [
            str(row["workers"]),
            format_bandwidth(row["bandwidth_bits_per_s"]),
            describe(row),
            f"{row['lr']:g}",
            f"{row['target']:.2f} %",
            "not reached" if reached is None else format_time(reached),
            str(row["steps"]),
            f"{dense[0] / reached:.2f} x" if reached and dense and dense[0] else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _same_race(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in ("workers", "bandwidth_bits_per_s", "target"))
