"""What all commands share: errors in one line, a progress bar, and tables."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from regtopk.errors import RegtopkError, RunExistsError
from regtopk.lab.experiments.experiment import ShowProgress
from regtopk.lab.report import HEADINGS, columns_of, format_number

P = ParamSpec("P")
T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def as_folder(text: str) -> Path:
    """A folder that is given; an empty word would be the current one."""
    if not text:
        raise typer.BadParameter("must be a folder, got ''")
    return Path(text)


folder_option = partial(typer.Option, parser=as_folder, metavar="PATH")


Force = Annotated[bool, typer.Option("--force", help="Replace a run that the folder holds.")]
_LEAST_NAME = 20  # columns of a name before it is folded
_GAP = 2  # between columns
_FILE_WIDTH = 160  # a file has no edge to cut names at


def say_errors(command: Callable[P, T]) -> Callable[P, T]:
    """Turn our own errors into one line and exit code 2, and Ctrl-C into exit code 130."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except RegtopkError as error:
            go_on = ", go on with --resume" if "resume" in kwargs else ""
            advice = f": choose another --out{go_on}, or replace it with --force"
            typer.echo(f"regtopk: {error}{advice if isinstance(error, RunExistsError) else ''}", err=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            typer.echo("regtopk: interrupted", err=True)
            raise typer.Exit(130) from None

    return wrapped


@contextmanager
def progress_bar(label: str) -> Iterator[ShowProgress]:
    """A bar on stderr; where that is no terminal, a line for each result that has words."""
    if not sys.stderr.isatty():

        def line(fraction: float, words: str = "") -> None:
            if words:
                typer.echo(f"{100 * fraction:5.1f} %  {words}", err=True)

        yield line
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=1.0)

        def show_fraction(fraction: float, words: str = "") -> None:
            bar.update(task, completed=fraction, description=f"{label}: {words}" if words else label)

        yield show_fraction


def show(content: Any, summaries: Mapping[str, Any], page: Path | None, *, as_json: bool) -> None:
    """Print the JSON; or tables (a column per method, a row per measure), what they say, and the page."""
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    for title, summary in summaries.items():
        _print_table(console, title, summary["table"])
    said = [note for summary in summaries.values() for note in summary.get("notes", [])]
    said += [summary["finding"] for summary in summaries.values() if "finding" in summary]
    typer.echo("\n".join([*said, *([] if page is None else [f"Figures and all numbers: {page}"])]))


def _print_table(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """In a narrow terminal headings break between words, then names. No number is cut; lines may break."""
    table, columns = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True), columns_of(rows)
    for column in columns:  # as wide as the longest number; the names in the first one may be folded
        name, cells = HEADINGS.get(column, column), [format_number(row.get(column), column) for row in rows]
        if name:
            least = max(map(len, (*_parts(name), *cells)))
            table.add_column(name, justify="right", overflow="fold", min_width=least)
        else:
            least = min(_LEAST_NAME, max(map(len, (title, *cells))))
            table.add_column(title, overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*(format_number(row.get(column), column) for column in columns))
    if console.measure(table, options=console.options.update(width=1000)).maximum > console.width:
        for each in table.columns[1:]:
            each.width = each.min_width or 0
            if each.width < max(map(len, str(each.header).split())):
                each.header = "\n".join(_parts(str(each.header)))
        least = sum((column.min_width or 0) + _GAP for column in table.columns)
        console = Console(width=max(console.width, least + _GAP))
    console.print(table)


def _parts(heading: str) -> list[str]:
    """Where a heading may break: regtopk:mu=5 in three."""
    return re.split(r" |(?<=[:=-])", heading)
