"""The commands that run experiments: reproduce, compare and train."""

import inspect
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from regtopk.cli.parts import Force, Json, progress_bar, say_errors, show
from regtopk.core.options import check_choice
from regtopk.errors import ArgumentError, OutputError, RunExistsError
from regtopk.lab.experiments import COMPARE, EXPERIMENTS, TRAIN, Experiment, parse_settings
from regtopk.lab.experiments.compare.comparison import Comparison
from regtopk.lab.experiments.paper.fig3 import PRESETS
from regtopk.lab.experiments.tasks import TASKS
from regtopk.lab.report import write_report
from regtopk.lab.runs import CONFIG

OUT = Path("out")
# the settings that have an option of their own, and the options that are not called as their setting is
REPRODUCED = ("algorithms", "like", "data", "deterministic", "device")
COMPARED = (
    "algorithms", "densities", "bytes_per_step", "like", "split", "value_code", "index_code", "optimizer",
    "lr", "num_workers", "num_steps", "data", "device",
)  # fmt: skip
TRAINED = (
    "task", "algorithms", "densities", "value_code", "index_code", "optimizer", "lr", "num_workers",
    "num_steps", "data", "device",
)  # fmt: skip
Seeds = Annotated[str | None, typer.Option(help="How many seeds, from 0 on: 3. Or which: 3,4,5 or 2-6.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the run; if not given, a new one in out/.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting.")]
RESUME_HELP = "Go on with the run that the folder holds, or add to it."
Resume = Annotated[bool, typer.Option("--resume", help=RESUME_HELP)]
FLAGS = {"densities": "--density", "num_workers": "--workers", "num_steps": "--steps"}


class Request(NamedTuple):
    """What a command is to run."""

    experiment: Experiment[Any]
    name: str  # of its folder in out/
    words: list[str]  # the command as typed, without options
    base: dict[str, Any] | None = None  # settings that the command stands for


def run(
    request: Request,
    chosen: dict[str, Any],
    *,
    seeds: Seeds = None,
    out: Out = None,
    settings: Settings = None,
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run an experiment and show what came out; every command here has these options."""
    if resume and force:
        raise ArgumentError("give one of --resume and --force, got both: one adds to a run, one replaces it")
    if "task" in (request.base or ()) and any(word.startswith("task=") for word in settings or ()):
        raise ArgumentError("task must be given as the command's own argument, got it with --set")
    if seeds is not None and "seeds" in {f.name for f in fields(request.experiment.config)}:
        chosen["seeds"] = seeds
    elif seeds is not None:
        typer.echo(f"regtopk: {request.name} draws nothing at random, --seeds changes nothing", err=True)
    given = [f"{name}={value}" for name, value in chosen.items()]
    config = parse_settings(request.experiment.config, [*given, *(settings or ())], request.base)
    typed = ["regtopk", *request.words, *as_typed(chosen, settings or ()), *(["--resume"] if resume else [])]
    folder = out or default_folder(request.name, resume=resume, force=force)
    try:
        with progress_bar(request.name) as progress:
            summary = request.experiment.record(
                config, folder, command=shlex.join(typed), resume=resume, force=force, progress=progress
            )
    except RunExistsError as error:
        advice = "choose another --out, go on with --resume, or replace it with --force"
        raise OutputError(f"{error}: {advice}") from None
    except KeyboardInterrupt:
        if isinstance(request.experiment, Comparison) and (folder / CONFIG).exists():
            typer.echo(f"regtopk: {folder} keeps what is done; --resume goes on from there", err=True)
        raise
    show(summary, {request.name: summary}, write_report(folder), as_json=as_json)


def runs(config: type, settings: Sequence[str]) -> Callable[[Callable[..., Request]], Any]:
    """Make a command of a function that says what to run; it also has options of settings, and of `run`."""
    options = {name: _option(config, name) for name in settings}
    common = {name: p for name, p in inspect.signature(run).parameters.items() if p.kind is p.KEYWORD_ONLY}

    def decorate(choose: Callable[..., Request]) -> Any:
        @wraps(choose)
        def command(**given: Any) -> None:
            chosen = {name: given.pop(name) for name in options}
            shared = {name: given.pop(name) for name in common}
            run(choose(**given), {k: v for k, v in chosen.items() if v is not None}, **shared)

        kind = inspect.Parameter.KEYWORD_ONLY
        own = [p.replace(kind=kind) for p in inspect.signature(choose).parameters.values()]
        added = [inspect.Parameter(name, kind, default=None, annotation=o) for name, o in options.items()]
        parameters = [*own, *added, *common.values()]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return say_errors(command)

    return decorate


def _option(config: type, name: str) -> Any:
    default: Any = next(f.default for f in fields(config) if f.name == name)
    kind: Any = type(default) if isinstance(default, (bool, int, float)) else str
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default or "")
    flag, text = FLAGS.get(name, f"--{name.replace('_', '-')}"), escape(_described(config, name))
    return Annotated[kind | None, typer.Option(flag, help=text, show_default=shown or False)]


def _described(config: type, name: str) -> str:
    """A setting's sentence in the docstring of its class."""
    pages = [part.__doc__ or "" for part in config.__mro__]
    pattern = rf"^ {{8}}{name}: (.*(?:\n {{9,}}.*)*)"
    found = next(filter(None, (re.search(pattern, page, re.MULTILINE) for page in pages)))
    sentence = " ".join(found[1].split())
    return sentence[0].upper() + sentence[1:]


def as_typed(chosen: Mapping[str, Any], settings: Sequence[str]) -> list[str]:
    """Settings as one types them."""
    flags = {name: FLAGS.get(name, f"--{name.replace('_', '-')}") for name in chosen}
    pairs = [[flags[k]] if v is True else [flags[k], str(v)] for k, v in chosen.items()]
    return [*chain(*pairs), *chain(*(["--set", setting] for setting in settings))]


def default_folder(name: str, *, resume: bool, force: bool) -> Path:
    """The first of out/NAME, out/NAME-2, out/NAME-3, ... without a run; to resume, the last with one."""
    folder = OUT / name
    for number in count(2):
        following = OUT / f"{name}-{number}"
        has_following = (following / CONFIG).exists()
        if force or not (folder / CONFIG).exists() or (resume and not has_following):
            break
        folder = following
    return folder


@runs(COMPARE.config, REPRODUCED)
def reproduce(
    experiment: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPERIMENTS)}.")],
    preset: Annotated[
        str | None, typer.Option(help=f"Protocol of fig3: {', '.join(PRESETS)}.", show_default="paper")
    ] = None,
) -> Request:
    """Run one of the paper's experiments; write records, figures and a page."""
    check_choice("experiment", experiment, EXPERIMENTS)
    own, words = EXPERIMENTS[experiment], ["reproduce", experiment]
    if not own.presets:
        if preset is not None:
            raise ArgumentError(f"preset must not be given for {experiment}, which has none, got {preset!r}")
        return Request(own, experiment, words)
    preset = preset or next(iter(own.presets))
    check_choice("preset", preset, own.presets)
    return Request(own, f"{experiment}-{preset}", [*words, "--preset", preset], own.presets[preset])


@runs(COMPARE.config, COMPARED)
def compare(task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")]) -> Request:
    """Compare methods on a task, at equal density or at equal bytes; write records, figures and a page."""
    return Request(COMPARE, f"compare-{task}", ["compare", task], {"task": task})


@runs(TRAIN.config, TRAINED)
def train() -> Request:
    """Train with real processes, by a method and dense; write records, figures and a page."""
    return Request(TRAIN, "train", ["train"])
