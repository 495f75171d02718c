"""The commands that run experiments: reproduce, compare and train."""

import inspect
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from regtopk.cli.parts import Force, Json, progress_bar, say_errors, show
from regtopk.core.options import check_choice
from regtopk.errors import ArgumentError, OutputError, RunExistsError
from regtopk.lab.experiments import COMPARE, EXPERIMENTS, TRAIN, Experiment, parse_settings
from regtopk.lab.experiments.comparison import Comparison
from regtopk.lab.experiments.deep.config import PRESETS, DeepConfig
from regtopk.lab.experiments.tasks import TASKS
from regtopk.lab.report import write_report
from regtopk.lab.runs import CONFIG, check_holds_no_run

OUT = Path("out")
FRESH_SEEDS = "2-6"  # suggested, to measure what was picked on seeds 0 and 1

# the settings that have an option of their own, and the options that are not called as their setting is
REPRODUCED = ("methods", "data", "weights", "deterministic", "device")
COMPARED = (
    "algorithms", "densities", "bytes_per_step", "like", "split", "value_code", "index_code", "optimizer",
    "lr", "num_workers", "num_steps", "data", "device",
)  # fmt: skip
TRAINED = (
    "task", "num_workers", "algorithm", "exchange", "every", "outer", "outer_lr", "outer_momentum", "delay",
    "fragments", "density", "value_code", "index_code", "optimizer", "lr", "num_steps", "data",
    "device",
)  # fmt: skip
FLAGS = {"densities": "--density", "num_workers": "--workers", "num_steps": "--steps", "num_seeds": "--seeds"}


def flag_of(setting: str) -> str:
    """The option of a setting."""
    return FLAGS.get(setting, f"--{setting.replace('_', '-')}")


@dataclass(frozen=True)
class Request:
    """What a command is to run.

    Args:
        experiment: which.
        name: of its folder in out/.
        words: the command as typed, without options.
        base: settings that the command stands for.
    """

    experiment: Experiment[Any]
    name: str
    words: Sequence[str]
    base: Mapping[str, Any] = field(default_factory=dict)


def run(
    request: Request,
    chosen: dict[str, Any],
    *,
    seeds: Annotated[
        str | None,
        typer.Option(help="How many seeds, from 0 on: 3. Compare, fig2, fig3 also take which: 3,4,5, 2-6."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; if not given, a new one in out/.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be given several times."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run that the folder holds, or add to it.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run an experiment and show what came out; every command here has these options."""
    if resume and force:
        raise ArgumentError("give one of --resume and --force, got both: one adds to a run, one replaces it")
    for key in ("preset", "task"):
        if key in request.base and any(word.startswith(f"{key}=") for word in settings or ()):
            raise ArgumentError(f"{key} must be given as the command's own argument, got it with --set")
    experiment = request.experiment
    if seeds is not None:
        chosen |= _seeds(experiment, seeds)
    given = [f"{name}={value}" for name, value in chosen.items()]
    config = parse_settings(experiment.config, [*given, *(settings or ())], request.base)
    typed = [*request.words, *as_typed(chosen, settings or ()), *(["--resume"] if resume else [])]
    folder = out or default_folder(request.name, resume=resume, force=force)
    command = shlex.join(["regtopk", *typed])
    try:
        with progress_bar(request.name) as progress:
            summary = experiment.record(
                config, folder, command=command, resume=resume, force=force, progress=progress
            )
    except RunExistsError as error:
        advice = "choose another --out, go on with --resume, or replace it with --force"
        raise OutputError(f"{error}: {advice}") from None
    except KeyboardInterrupt:
        if isinstance(experiment, Comparison) and (folder / CONFIG).exists():
            typer.echo(f"regtopk: {folder} keeps what is done; --resume goes on from there", err=True)
        raise
    if not as_json and "finding" in summary:
        typer.echo(summary["finding"])
        claim = summary["claim"]
        if claim and not claim["gain"]:
            methods = f"{claim['against']},{claim['method']}"
            typer.echo(f"To measure it: --seeds {FRESH_SEEDS} --methods {methods} --resume")
    show(summary, {request.name: summary}, write_report(folder), as_json=as_json)


def runs(config: type, settings: Sequence[str]) -> Callable[[Callable[..., Request]], Any]:
    """Make a command of a function that says what to run.

    The command has the function's own options, an option for each of some settings, and those of `run`.
    A setting's option takes its type, default and description from the dataclass of the settings.

    Args:
        config: the dataclass of the settings; its docstring describes them.
        settings: which of them.
    """
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
    if config is DeepConfig and any(name in preset for preset in PRESETS.values()):
        shown = "the preset's"
    text = escape(_described(config, name))
    return Annotated[kind | None, typer.Option(flag_of(name), help=text, show_default=shown or False)]


def _described(config: type, name: str) -> str:
    """A setting's sentence in the docstring of its class."""
    for part in config.__mro__:
        found = re.search(rf"^ {{8}}{name}: (.*(?:\n {{9,}}.*)*)", part.__doc__ or "", re.MULTILINE)
        if found:
            sentence = " ".join(found[1].split())
            return sentence[0].upper() + sentence[1:]
    raise AssertionError(f"{config.__name__} does not describe {name}")


def as_typed(chosen: Mapping[str, Any], settings: Sequence[str]) -> list[str]:
    """Settings as one types them."""
    pairs = [[flag_of(k)] if v is True else [flag_of(k), str(v)] for k, v in chosen.items()]
    return [word for pair in (*pairs, *(["--set", setting] for setting in settings)) for word in pair]


def default_folder(name: str, *, resume: bool, force: bool) -> Path:
    """The first of out/NAME, out/NAME-2, out/NAME-3, ... without a run; to resume, the last with one."""
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
    known = {f.name for f in fields(experiment.config)}
    if "num_seeds" in known and (seeds.isdigit() or "seeds" not in known):
        return {"num_seeds": seeds}
    if "seeds" in known:
        return {"seeds": seeds}
    typer.echo(f"regtopk: {experiment.name} draws nothing at random, --seeds changes nothing", err=True)
    return {}


@runs(DeepConfig, REPRODUCED)
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
    base = {"preset": preset, **own.presets[preset]}
    return Request(own, f"{experiment}-{preset}", [*words, "--preset", preset], base)


@runs(COMPARE.config, COMPARED)
def compare(task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")]) -> Request:
    """Compare methods on a task, at equal density or at equal bytes; write records, figures and a page."""
    return Request(COMPARE, f"compare-{task}", ["compare", task], {"task": task})


@runs(TRAIN.config, TRAINED)
def train() -> Request:
    """Train with real processes, by a method and dense; write records, figures and a page."""
    return Request(TRAIN, "train", ["train"])
