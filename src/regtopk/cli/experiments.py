"""The commands that run experiments: reproduce, compare and train."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from regtopk.cli.parts import (
    Force,
    Json,
    Resume,
    Settings,
    as_typed,
    progress_bar,
    say_errors,
    show,
    takes_settings,
)
from regtopk.core.options import check_choice
from regtopk.errors import ArgumentError, OutputError
from regtopk.experiments import COMPARE, EXPERIMENTS, TRAIN, Experiment, parse_settings
from regtopk.experiments.comparison import Comparison
from regtopk.experiments.deep.config import PRESETS, DeepConfig
from regtopk.experiments.tasks import TASKS
from regtopk.report import write_report
from regtopk.run_writer import check_holds_no_run
from regtopk.runs import CONFIG

OUT = Path("out")
REPRODUCE_FLAGS = {name: f"--{name}" for name in ("methods", "data", "weights", "deterministic", "device")}
COMPARE_FLAGS = {
    **{name: f"--{name}" for name in ("algorithms", "like", "split", "optimizer", "lr", "data", "device")},
    "densities": "--density",
    "bytes_per_step": "--bytes-per-step",
    "value_code": "--value-code",
    "index_code": "--index-code",
    "num_workers": "--workers",
    "num_steps": "--steps",
}
TRAIN_FLAGS = {
    "num_workers": "--workers",
    **{name: f"--{name}" for name in ("algorithm", "density", "scope", "dataset", "lr", "device")},
    "value_code": "--value-code",
    "num_steps": "--steps",
    "num_seeds": "--seeds",
}
Folder = Annotated[
    Path | None,
    typer.Option(help="Folder of the run; if not given, a new one in out/ with the experiment's name."),
]
Seeds = Annotated[
    str | None,
    typer.Option(help="How many seeds, from 0 on: 3. Or which, for most: 3,4,5 or 2-6, and 3-3 for seed 3."),
]


@say_errors
@takes_settings(DeepConfig, REPRODUCE_FLAGS)
def reproduce(
    experiment: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.")],
    chosen: dict[str, Any],
    preset: Annotated[
        str | None, typer.Option(help=f"Protocol of fig3: {', '.join(PRESETS)}.", show_default="paper")
    ] = None,
    seeds: Seeds = None,
    out: Folder = None,
    resume: Resume = False,
    settings: Settings = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run one of the paper's experiments; write records, figures and a page."""
    check_choice("experiment", experiment, EXPERIMENTS)
    own = EXPERIMENTS[experiment]
    words, name = ["reproduce", experiment], experiment
    base: dict[str, Any] = {}
    if own.presets:
        preset = preset or next(iter(own.presets))
        check_choice("preset", preset, own.presets)
        if any(word.startswith("preset=") for word in settings or ()):
            raise ArgumentError("a preset must be chosen with --preset, got it with --set")
        words += ["--preset", preset]
        base = {"preset": preset, **own.presets[preset]}
        name = f"{experiment}-{preset}"
    elif preset is not None:
        raise ArgumentError(f"preset must not be given for {experiment}, which has none, got {preset!r}")
    if seeds is not None:
        chosen |= _seeds(own, seeds)
    flags = {**REPRODUCE_FLAGS, "seeds": "--seeds", "num_seeds": "--seeds"}
    run(
        own, chosen, list(settings or ()), flags, words=words, base=base, out=out, name=name,
        resume=resume, force=force, as_json=as_json,
    )  # fmt: skip


@say_errors
@takes_settings(COMPARE.config, COMPARE_FLAGS)
def compare(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    chosen: dict[str, Any],
    seeds: Seeds = None,
    out: Folder = None,
    resume: Resume = False,
    settings: Settings = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compare methods on a task, at equal density or at equal bytes; write records, figures and a page."""
    if seeds is not None:
        chosen |= _seeds(COMPARE, seeds)
    flags = {**COMPARE_FLAGS, "seeds": "--seeds", "num_seeds": "--seeds"}
    run(
        COMPARE, chosen, list(settings or ()), flags, words=["compare", task], base={"task": task}, out=out,
        name=f"compare-{task}", resume=resume, force=force, as_json=as_json,
    )  # fmt: skip


@say_errors
@takes_settings(TRAIN.config, TRAIN_FLAGS)
def train(
    chosen: dict[str, Any],
    out: Folder = None,
    settings: Settings = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train with real processes, with an algorithm and dense; write records, figures and a page."""
    run(
        TRAIN, chosen, list(settings or ()), TRAIN_FLAGS, words=["train"], base={}, out=out, name="train",
        resume=False, force=force, as_json=as_json,
    )  # fmt: skip


def run(
    experiment: Experiment[Any],
    chosen: Mapping[str, Any],
    settings: Sequence[str],
    flags: Mapping[str, str],
    *,
    words: Sequence[str],
    base: Mapping[str, Any],
    out: Path | None,
    name: str,
    resume: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Run an experiment and show what came out.

    Args:
        experiment: which.
        chosen: settings given by options.
        settings: and those given by --set.
        flags: the options.
        words: the command without them.
        base: settings that the command stands for.
        out: the folder, if one was given.
        name: of the folder otherwise.
        resume, force, as_json: as given.
    """
    if resume and force:
        raise ArgumentError("--resume adds to what --force would replace: give one of them, got both")
    config = parse_settings(experiment.config, [*(f"{k}={v}" for k, v in chosen.items()), *settings], base)
    typed = [*words, *as_typed(chosen, flags, settings), *(["--resume"] if resume else [])]
    folder = out or default_folder(name, resume=resume, force=force)
    try:
        with progress_bar(name) as progress:
            summary = experiment.record(
                config,
                folder,
                command=shlex.join(["regtopk", *typed]),
                resume=resume,
                force=force,
                progress=progress,
            )
    except KeyboardInterrupt:
        if isinstance(experiment, Comparison) and (folder / CONFIG).exists():
            typer.echo(f"regtopk: {folder} keeps what is done; --resume goes on from there", err=True)
        raise
    if not as_json and "finding" in summary:
        typer.echo(summary["finding"])
    show(summary, {name: summary}, write_report(folder), as_json=as_json)


def default_folder(name: str, *, resume: bool, force: bool) -> Path:
    """out/NAME, or the first of out/NAME-2, out/NAME-3, ... without a run; to resume, the last with one."""
    folder, number = OUT / name, 1
    while not force and _holds_run(folder):
        previous, number = folder, number + 1
        folder = OUT / f"{name}-{number}"
        if resume and not _holds_run(folder):
            return previous
    return folder


def _holds_run(folder: Path) -> bool:
    try:
        check_holds_no_run(folder)
    except OutputError:
        return True
    return False


def _seeds(experiment: Experiment[Any], seeds: str) -> dict[str, str]:
    """The setting that --seeds changes: their number, or which ones."""
    known = {field.name for field in fields(experiment.config)}
    if "num_seeds" in known and (seeds.isdigit() or "seeds" not in known):
        return {"num_seeds": seeds}
    if "seeds" in known:
        return {"seeds": seeds}
    typer.echo(f"regtopk: {experiment.name} draws nothing at random, --seeds changes nothing", err=True)
    return {}
