"""regtopk reproduce fig3: deep networks, in slices that add to one folder."""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from regtopk.cli.parts import as_typed, show
from regtopk.errors import ArgumentError, OutputError, RunExistsError
from regtopk.experiments import parse_settings
from regtopk.experiments.deep.config import PRESETS, DeepConfig
from regtopk.experiments.fig3 import record
from regtopk.experiments.settings import check_word
from regtopk.report import write_report
from regtopk.runs import CONFIG

OPTIONS = {
    name: f"--{name}" for name in ("preset", "methods", "seeds", "data", "weights", "device", "deterministic")
}


def reproduce_fig3(
    given: Mapping[str, Any],
    settings: list[str],
    out: Path | None,
    *,
    resume: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Run a slice, and show all that its folder holds."""
    if resume and force:
        raise ArgumentError("--resume adds to what --force would replace: give one of them, got both")
    if any(word.startswith("preset=") for word in settings):
        raise ArgumentError("a preset must be chosen with --preset, got it with --set")
    preset = given.get("preset") or "paper"
    check_word("preset", preset, PRESETS)
    chosen = [f"{key}={value}" for key, value in given.items() if value is not None and key != "preset"]
    config = parse_settings(DeepConfig, [*chosen, *settings], {"preset": preset, **PRESETS[preset]})
    words = as_typed([f"preset={preset}", *chosen, *settings], OPTIONS)
    command = shlex.join(["regtopk", "reproduce", "fig3", *_flags(words), *(["--resume"] if resume else [])])
    folder = out or Path("out") / f"fig3-{preset}"
    try:
        with _progress() as say:
            summary = record(config, folder, command=command, resume=resume, force=force, say=say)
    except RunExistsError as error:
        advice = "choose another --out, go on with --resume, or replace it with --force"
        raise OutputError(f"{error}: {advice}") from None
    except KeyboardInterrupt:
        if (folder / CONFIG).exists():
            typer.echo(f"regtopk: {folder} keeps what is done; --resume goes on from there", err=True)
        raise
    if not as_json:
        typer.echo(summary["finding"])
    show(summary, {f"fig3, {preset}": summary}, write_report(folder), as_json=as_json)


def _flags(words: Iterator[str]) -> Iterator[str]:
    """A flag as one types it: without its value, and not at all where that is false."""
    for word in words:
        if word != "--deterministic" or next(words).lower() == "true":
            yield word


@contextmanager
def _progress() -> Iterator[Callable[[float, str], None]]:
    """A bar with the newest accuracy and the time left; where there is no terminal, a line now and then."""
    if not sys.stderr.isatty():
        yield lambda fraction, words: typer.echo(f"{100 * fraction:5.1f} %  {words}", err=True)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading the data", total=1.0)
        yield lambda fraction, words: bar.update(task, completed=fraction, description=words)
