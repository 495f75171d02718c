"""The command line: parse, call, print."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from regtopk import ALGORITHMS, __version__
from regtopk.cli.compare import compare
from regtopk.cli.doctor import doctor
from regtopk.cli.fig3 import reproduce_fig3
from regtopk.cli.parts import Force, Json, Settings, as_typed, progress_bar, say_errors, show
from regtopk.cli.plan import plan
from regtopk.errors import ArgumentError, OutputError
from regtopk.experiments import EXPERIMENTS, TRAIN, parse_settings
from regtopk.experiments.deep.config import PRESETS
from regtopk.experiments.settings import check_word
from regtopk.report import write_report
from regtopk.runs import CONFIG, SUMMARY, claim_folder, read_header, versions, write_json

app = typer.Typer(
    help="Train over slow networks by sending a thousandth of the gradient.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
FIG3 = "fig3"
REPRODUCED = (*EXPERIMENTS, FIG3)
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
    experiment: Annotated[str, typer.Argument(help=f"One of {', '.join(REPRODUCED)}.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; if not given out/EXPERIMENT, or out/fig3-PRESET.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="How many data seeds, from 0 on; of fig3 also which: 3,4,5 or 2-6 or 3,"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"Protocol of fig3: {', '.join(PRESETS)}.", show_default="paper")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help="Of fig3: NAME[:OPTION=VALUE]... with commas, also lr and index_code.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Of fig3: where the data set is.")] = None,
    weights: Annotated[str | None, typer.Option(help="Of fig3: file of weights to start from.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Of fig3: add to the runs that the folder holds.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Of fig3: only bit-reproducible kernels.")
    ] = False,
    settings: Settings = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run one of the paper's experiments; write records, figures and a page."""
    check_word("experiment", experiment, REPRODUCED)
    own = {
        "preset": preset,
        "methods": methods,
        "data": data,
        "weights": weights,
        "deterministic": "true" if deterministic else None,
    }
    if experiment == FIG3:
        given = {**own, "seeds": seeds, "device": device}
        reproduce_fig3(given, list(settings or ()), out, resume=resume, force=force, as_json=as_json)
        return
    if any(value is not None for value in own.values()) or resume:
        raise ArgumentError(
            f"--preset, --methods, --data, --weights, --resume and --deterministic belong to fig3, "
            f"got one of them with {experiment!r}"
        )
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
    show(summary, {experiment: summary}, write_report(folder), as_json=as_json)


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
    show(summary, {TRAIN.name: summary}, write_report(out), as_json=as_json)


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
    show(summaries, summaries, write_report(out), as_json=as_json)


@app.command()
@say_errors
def report(folder: Annotated[Path, typer.Argument(help="Folder of a recorded run.")]) -> None:
    """Draw the figures and the page of a recorded run again."""
    typer.echo(f"{write_report(folder)}")


def _run(name: str, settings: Sequence[str], folder: Path, *, force: bool) -> dict[str, Any]:
    experiment = RUNS[name]
    config = parse_settings(experiment.config, settings)
    if name == TRAIN.name:
        command = ["train", *as_typed(settings, TRAIN_OPTIONS)]
    else:
        command = ["reproduce", name, *as_typed(settings, OPTIONS)]
    with progress_bar(name) as progress:
        return experiment.record(
            config, folder, command=shlex.join(["regtopk", *command]), force=force, progress=progress
        )


def _holds_demo(folder: Path) -> bool:
    try:
        return "parts" in read_header(folder)
    except OutputError:
        return False


app.command()(compare)
app.command()(doctor)
app.command()(plan)
