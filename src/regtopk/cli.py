"""The command line: parse, call, print."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from regtopk import ALGORITHMS, __version__
from regtopk.errors import ArgumentError, OutputError, RegtopkError
from regtopk.experiments import EXPERIMENTS, TRAIN, parse_settings
from regtopk.report import format_number, write_report
from regtopk.runs import CONFIG, SUMMARY, claim_folder, read_header, versions, write_json

app = typer.Typer(
    help="Train over slow networks by sending a thousandth of the gradient.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
P = ParamSpec("P")
T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeats.")
]
DEMO_PARTS: dict[str, list[str]] = {"train": [], "fig1": [], "scaling": [], "fig2": ["num_seeds=2"]}
DEMO = {
    "experiment": "demo",
    "title": "RegTop-k in four small experiments",
    "about": (
        "A real training by two processes, and the paper's examples in the simulator: two workers that "
        "cancel, a step that waited too long, and twenty workers that disagree."
    ),
    "command": "regtopk demo",
}
RUNS = {**EXPERIMENTS, TRAIN.name: TRAIN}
OPTIONS = {"num_seeds": "--seeds", "device": "--device"}  # settings that have an option of their own
TRAIN_OPTIONS = {
    **OPTIONS,
    "num_workers": "--workers",
    "algorithm": "--algorithm",
    "density": "--density",
    "value_code": "--value-code",
    "scope": "--scope",
    "dataset": "--dataset",
    "num_steps": "--steps",
    "lr": "--lr",
}
Force = Annotated[bool, typer.Option("--force", help="Replace a run that the folder holds.")]


def say_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Turn our own errors into one line and exit code 2, and Ctrl-C into exit code 130."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except RegtopkError as error:
            typer.echo(f"regtopk: {error}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("regtopk: interrupted", err=True)
            raise typer.Exit(130) from None

    return wrapped


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regtopk {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train over slow networks by sending a thousandth of the gradient."""


@app.command("list")
@say_errors
def list_algorithms(as_json: Json = False) -> None:
    """List the algorithms and their options."""
    rows = [_describe(name) for name in ALGORITHMS]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("name", "what it does", "options", box=SIMPLE_HEAD)
    for row in rows:
        options = ", ".join(
            name if default is None else f"{name}={default}" for name, default in row["options"].items()
        )
        table.add_row(row["name"], row["summary"], options)
    Console().print(table)


def _describe(name: str) -> dict[str, Any]:
    algorithm = ALGORITHMS[name]
    summary = (algorithm.__doc__ or "").partition("\n")[0]
    options = {f.name: None if f.default is MISSING else _plain(f.default) for f in fields(algorithm)}
    return {"name": name, "class": algorithm.__name__, "summary": summary, "options": options}


def _plain(default: Any) -> Any:
    return str(default) if default == float("inf") else default


@app.command()
@say_errors
def reproduce(
    experiment: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the run; out/EXPERIMENT if not given.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many data seeds, from 0 on.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    settings: Settings = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run one of the paper's experiments; write records, figures and a page."""
    if experiment not in EXPERIMENTS:
        raise ArgumentError(f"experiment must be one of {', '.join(EXPERIMENTS)}, got {experiment!r}")
    chosen = list(settings or ())
    has_seeds = any(f.name == "num_seeds" for f in fields(EXPERIMENTS[experiment].config))
    if seeds is not None and has_seeds:
        chosen.append(f"num_seeds={seeds}")
    elif seeds is not None:
        typer.echo(f"regtopk: {experiment} draws nothing at random, --seeds changes nothing", err=True)
    if device is not None:
        chosen.append(f"device={device}")
    folder = out or Path("out") / experiment
    summary = _run(experiment, chosen, folder, force=force)
    _show(summary, {experiment: summary}, write_report(folder), as_json=as_json)


def _option(field: str, text: str) -> Any:
    """An option of `train`: its setting's name, what it is, and the setting's default."""
    return typer.Option(TRAIN_OPTIONS[field], help=text, show_default=str(getattr(TRAIN.config, field)))


@app.command()
@say_errors
def train(
    workers: Annotated[int | None, _option("num_workers", "How many processes.")] = None,
    algorithm: Annotated[str | None, _option("algorithm", "See regtopk list.")] = None,
    density: Annotated[float | None, _option("density", "Share of the entries a worker sends.")] = None,
    value_code: Annotated[str | None, _option("value_code", "How values travel.")] = None,
    scope: Annotated[str | None, _option("scope", "Select over the model, or over each bucket.")] = None,
    dataset: Annotated[str | None, _option("dataset", "What is learned.")] = None,
    steps: Annotated[int | None, _option("num_steps", "How many steps.")] = None,
    lr: Annotated[float | None, _option("lr", "Learning step length.")] = None,
    seeds: Annotated[int | None, _option("num_seeds", "How many seeds, from 0 on.")] = None,
    device: Annotated[str | None, _option("device", "cpu or cuda.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("out/train"),
    settings: Settings = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train with real processes, with an algorithm and dense; write records, figures and a page."""
    given = {
        "num_workers": workers,
        "algorithm": algorithm,
        "density": density,
        "value_code": value_code,
        "scope": scope,
        "dataset": dataset,
        "num_steps": steps,
        "lr": lr,
        "num_seeds": seeds,
        "device": device,
    }
    chosen = [f"{name}={value}" for name, value in given.items() if value is not None]
    summary = _run(TRAIN.name, [*chosen, *(settings or ())], out, force=force)
    _show(summary, {TRAIN.name: summary}, write_report(out), as_json=as_json)


@app.command()
@say_errors
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the demo.")] = Path("out/demo"),
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train with two processes, run the paper's small experiments, print one table and write one page."""
    force = force or _holds_demo(out)  # a demo may replace a demo
    claim_folder(out, force=force)
    write_json(out / CONFIG, {**DEMO, "versions": versions(), "parts": list(DEMO_PARTS)})
    summaries = {name: _run(name, chosen, out / name, force=force) for name, chosen in DEMO_PARTS.items()}
    write_json(out / SUMMARY, summaries)
    _show(summaries, summaries, write_report(out), as_json=as_json)


@app.command()
@say_errors
def report(folder: Annotated[Path, typer.Argument(help="Folder of a recorded run.")]) -> None:
    """Draw the figures and the page of a recorded run again."""
    typer.echo(f"{write_report(folder)}")


def _run(name: str, settings: Sequence[str], folder: Path, *, force: bool) -> dict[str, Any]:
    experiment = RUNS[name]
    config = parse_settings(experiment.config, settings)
    if name == TRAIN.name:
        command = ["train", *_options(settings, TRAIN_OPTIONS)]
    else:
        command = ["reproduce", name, *_options(settings, OPTIONS)]
    with _progress_bar(name) as progress:
        return experiment.record(
            config, folder, command=shlex.join(["regtopk", *command]), force=force, progress=progress
        )


def _holds_demo(folder: Path) -> bool:
    try:
        return "parts" in read_header(folder)
    except OutputError:
        return False


def _options(settings: Sequence[str], short: Mapping[str, str]) -> Iterator[str]:
    """The settings as one would type them."""
    for word in settings:
        key, _, value = word.partition("=")
        yield from (short[key], value) if key in short else ("--set", word)


@contextmanager
def _progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr, silent where that is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)


def _show(content: Any, summaries: Mapping[str, Any], page: Path, *, as_json: bool) -> None:
    """Print the JSON, or one table (a column a method, a row a measure) and where the page is."""
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    rows = [row for summary in summaries.values() for row in summary["table"]]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        is_label = column == "measure"
        table.add_column("" if is_label else column, justify="left" if is_label else "right")
    for name, summary in summaries.items():
        table.add_section()
        table.add_row(name, style="bold")
        for row in summary["table"]:
            table.add_row(*(format_number(row.get(column)) for column in columns))
    Console().print(table)
    typer.echo(f"{page}")
