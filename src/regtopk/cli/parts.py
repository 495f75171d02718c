"""What all commands share: errors in one line, a progress bar, tables, and options made from settings."""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from regtopk.errors import RegtopkError
from regtopk.experiments.experiment import Progress
from regtopk.report import columns_of, format_number

P = ParamSpec("P")
T = TypeVar("T")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeats.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace a run that the folder holds.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run that the folder holds, or add to it.")
]

_LEAST_NAME = 24  # columns of a name before it is folded
_GAP = 2  # between columns
_FILE_WIDTH = 160  # a file has no edge to cut names at


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


def takes_settings(config: type, flags: Mapping[str, str]) -> Callable[[Callable[..., None]], Any]:
    """Give a command an option for each of some settings, with their type, default and description.

    The command is called with `chosen`: the settings that were given, by name.

    Args:
        config: the dataclass of the settings; its docstring describes them.
        flags: the option of each setting.
    """
    described, defaults = _descriptions(config), {f.name: f.default for f in fields(config)}
    options = {}
    for name, flag in flags.items():
        default = defaults[name]
        kind: Any = type(default) if isinstance(default, (bool, int, float)) else str
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default or "")
        option = typer.Option(flag, help=described[name], show_default=shown or False)
        options[name] = Annotated[kind | None, option]

    def decorate(command: Callable[..., None]) -> Any:
        @wraps(command)
        def wrapped(**given: Any) -> None:
            values = {name: given.pop(name) for name in options}
            command(chosen={name: value for name, value in values.items() if value is not None}, **given)

        signature = inspect.signature(command)
        kind = inspect.Parameter.KEYWORD_ONLY
        own = [p.replace(kind=kind) for name, p in signature.parameters.items() if name != "chosen"]
        added = [
            inspect.Parameter(name, kind, default=None, annotation=option) for name, option in options.items()
        ]
        own.sort(key=lambda p: p.default is not p.empty)  # arguments, settings, and what all commands have
        num = sum(p.default is p.empty for p in own)
        wrapped.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own[:num], *added, *own[num:]]
        )
        hints = {name: hint for name, hint in command.__annotations__.items() if name != "chosen"}
        wrapped.__annotations__ = {**hints, **options}
        return wrapped

    return decorate


def _descriptions(config: type) -> dict[str, str]:
    """Each setting's sentence in the docstring of its class."""
    found: dict[str, str] = {}
    for part in reversed(config.__mro__):
        _, _, arguments = (part.__doc__ or "").partition("Args:")
        for names, text in re.findall(r"^ {8}([\w, ]+): (.*(?:\n {9,}.*)*)", arguments, re.MULTILINE):
            sentence = " ".join(text.split())
            found.update(dict.fromkeys(names.split(", "), sentence[0].upper() + sentence[1:]))
    return found


def as_typed(chosen: Mapping[str, Any], flags: Mapping[str, str], settings: Sequence[str]) -> list[str]:
    """The settings as one types them."""
    words: list[str] = []
    for name, value in chosen.items():
        words += [flags[name]] if value is True else [flags[name], str(value)]
    return words + [word for setting in settings for word in ("--set", setting)]


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
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


def show(content: Any, summaries: Mapping[str, Any], page: Path, *, as_json: bool) -> None:
    """Print the JSON, or one table (a column a method, a row a measure) and where the page is."""
    if as_json:
        typer.echo(json.dumps(content, indent=2))
        return
    rows = [row for summary in summaries.values() for row in summary["table"]]
    columns = columns_of(rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        _add_column(table, column, [format_number(row.get(column)) for row in rows])
    for name, summary in summaries.items():
        table.add_section()
        table.add_row(name, style="bold")
        for row in summary["table"]:
            table.add_row(*(format_number(row.get(column)) for column in columns))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    _fit(table, console)
    console.print(table)
    typer.echo(f"{page}")


def _add_column(table: Table, name: str, cells: Sequence[str]) -> None:
    """Numbers to the right; a column is as wide as its longest word at least, of names a part of it."""
    if name == "measure":
        longest = max((len(cell) for cell in cells), default=0)
        table.add_column("", overflow="fold", min_width=min(longest, _LEAST_NAME))
        return
    words = [word for text in (name, *cells) for word in text.split(" ")]
    table.add_column(name, justify="right", overflow="fold", min_width=max(len(word) for word in words))


def _fit(table: Table, console: Console) -> None:
    """In a narrow terminal headings break between words, then names; no number is cut, lines may break."""
    anywhere = console.options.update(width=1000)
    if console.measure(table, options=anywhere).maximum <= console.width:
        return
    for column in table.columns:
        if column.justify == "right":
            column.width = column.min_width
    least = sum((column.min_width or 0) + _GAP for column in table.columns)
    console.width = max(console.width, least + _GAP)
