"""What all commands share: errors in one line, a progress bar, tables, and settings as one types them."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from regtopk.errors import RegtopkError
from regtopk.report import columns_of, format_number

P = ParamSpec("P")
T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeats.")
]
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


def as_typed(settings: Sequence[str], short: Mapping[str, str]) -> Iterator[str]:
    """The settings as one would type them."""
    for word in settings:
        key, _, value = word.partition("=")
        yield from (short[key], value) if key in short else ("--set", word)


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr, silent where that is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label, total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)


def show(content: Any, summaries: Mapping[str, Any], page: Path, *, as_json: bool) -> None:
    """Print the JSON, or one table (a column a method, a row a measure) and where the page is."""
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    rows = [row for summary in summaries.values() for row in summary["table"]]
    columns = columns_of(rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        is_label = column == "measure"
        justify: JustifyMethod = "left" if is_label else "right"
        table.add_column("" if is_label else column, justify=justify, overflow="fold")  # names stay whole
    for name, summary in summaries.items():
        table.add_section()
        table.add_row(name, style="bold")
        for row in summary["table"]:
            table.add_row(*(format_number(row.get(column)) for column in columns))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a file has no edge to cut names at
    console.print(table)
    typer.echo(f"{page}")
