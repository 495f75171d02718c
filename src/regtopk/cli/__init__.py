"""The command line: the app, and the commands list, demo, report, fetch and doctor."""

import json
import shlex
from contextlib import suppress
from dataclasses import MISSING, fields
from math import inf
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from regtopk import ALGORITHMS, __version__, kernels
from regtopk.cli.experiments import as_typed, compare, reproduce, train
from regtopk.cli.parts import Force, Json, folder_option, progress_bar, say_errors, show
from regtopk.cli.plan import plan
from regtopk.core.options import counted
from regtopk.errors import OutputError
from regtopk.lab.experiments import EXPERIMENTS, TRAIN, parse_settings
from regtopk.lab.experiments.data.files import TEXTS, data_folder
from regtopk.lab.experiments.data.text import TOKENS, fetch_text
from regtopk.lab.report import write_report
from regtopk.lab.runs import RunWriter, read_header, versions

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
DEMO_PARTS: dict[str, list[str]] = {"train": [], "fig1": [], "scaling": [], "fig2": ["seeds=2"]}
DEMO = {
    "experiment": "demo",
    "title": "RegTop-k in four small experiments",
    "about": "A real training by two processes, and the paper's examples in the simulator: two workers that "
    "cancel, a step that waited too long, and twenty workers that disagree.",
    "command": "regtopk demo",
}


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
    """Train over slow networks by sending about a hundredth of the bytes."""


@app.command("list")
@say_errors
def list_algorithms(as_json: Json = False) -> None:
    """List the algorithms and their options."""
    rows: list[dict[str, Any]] = []
    table = Table("name", "what it does", "options", box=SIMPLE_HEAD)
    for name, algorithm in ALGORITHMS.items():
        summary = (algorithm.__doc__ or "").partition("\n")[0]
        options = {f.name: None if f.default is MISSING else f.default for f in fields(algorithm)}
        options |= {key: "inf" for key, value in options.items() if value == inf}  # JSON has no infinity
        rows.append({"name": name, "class": algorithm.__name__, "summary": summary, "options": options})
        words = [key if value is None else f"{key}={value}" for key, value in options.items()]
        table.add_row(name, summary, ", ".join(words))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        Console().print(table)


@app.command()
@say_errors
def demo(
    out: Annotated[Path, folder_option(help="Folder of the demo.")] = Path("out/demo"),
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train with two processes, run the paper's small experiments, print tables and write one page."""
    with suppress(OutputError):
        force = force or "parts" in read_header(out)  # a demo may replace a demo
    header, summaries = {**DEMO, "versions": versions(), "parts": list(DEMO_PARTS)}, {}
    with RunWriter(out, header, force=force) as writer:
        for name, settings in DEMO_PARTS.items():
            experiment = TRAIN if name == TRAIN.name else EXPERIMENTS[name]
            words = ["train"] if experiment is TRAIN else ["reproduce", name]
            command = shlex.join(["regtopk", *words, *as_typed({}, settings)])
            config = parse_settings(experiment.config, settings)
            with progress_bar(name) as progress:
                summaries[name] = experiment.record(
                    config, out / name, command=command, force=force, progress=progress
                )
        writer.finish(summaries)
    show(summaries, summaries, write_report(out), as_json=as_json)


@app.command()
@say_errors
def report(folder: Annotated[Path, typer.Argument(help="Folder of a recorded run.")]) -> None:
    """Draw the figures and the page of a recorded run again."""
    typer.echo(f"{write_report(folder)}")


@app.command()
@say_errors
def fetch(
    text: Annotated[str, typer.Argument(help=f"One of {', '.join(TEXTS)}; or a file, to fetch its tokens.")],
    tokens: Annotated[str, typer.Option(help=f"One of {', '.join(TOKENS)}.")] = "bytes",
) -> None:
    """Fetch a text and what its tokens need, for compare gpt and train; encode it where that takes long."""
    found = fetch_text(Path(text), tokens)
    num_tokens = sum(len(part) for part in (found.train, found.validation, found.test) if part is not None)
    typer.echo(f"{text} has {num_tokens:,} tokens ({tokens}); files are kept in {data_folder()}")


@app.command()
@say_errors
def doctor(
    seconds: Annotated[
        float, typer.Option(min=0, max=3600, help="How long to check each device's kernel.")
    ] = 2.0,
    as_json: Json = False,
) -> None:
    """Say which kernel each device uses and why, and check it against the reference."""
    devices: list[dict[str, Any]] = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        choice, check = kernels.describe(device), kernels.self_check(device, seconds)
        chosen = {"device": device, "name": name, "kernel": choice.kernel, "reason": choice.reason}
        devices.append({**chosen, "num_cases": check.num_cases, "failure": check.failure})
    found: dict[str, Any] = {**versions(), "num_threads": torch.get_num_threads(), "devices": devices}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(f"regtopk {found['regtopk']}, torch {found['torch']}, Python {found['python']}")
        typer.echo(f"{counted(found['num_threads'], 'thread')} on {found['machine']}")
        for each in devices:
            where = f"{each['device']} ({each['name']})"
            typer.echo(f"{where}: {each['kernel']} kernels: {each['reason']}")
            if each["kernel"] == "reference":
                typer.echo("  which is what other kernels are compared with")
            elif each["failure"] is None:
                typer.echo(f"  agrees with the reference in {counted(each['num_cases'], 'random case')}")
            else:
                typer.echo(f"  DIFFERS from the reference at {each['failure']}", err=True)
    if any(each["failure"] is not None for each in devices):
        raise typer.Exit(1)


app.add_typer(reproduce, name="reproduce", help="Run one of the paper's experiments; write a page.")
for _command in (train, compare, plan):
    app.command()(_command)
