"""The commands that run experiments: reproduce, compare and train."""

import inspect
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.markup import escape

from regtopk.cli.parts import Force, Json, folder_option, progress_bar, say_errors, show
from regtopk.core.options import check_choice
from regtopk.errors import ArgumentError
from regtopk.lab.experiments import COMPARE, EXPERIMENTS, TRAIN, Experiment, parse_settings
from regtopk.lab.experiments.compare.comparison import Comparison
from regtopk.lab.experiments.ranks.config import SIMULATED
from regtopk.lab.experiments.tasks import TASKS
from regtopk.lab.report import write_report
from regtopk.lab.runs import CONFIG

OUT = Path("out")
# the settings that have an option of their own, and the options that are not called as their setting is
REPRODUCED = ("algorithms", "like", "data", "deterministic", "device", "seeds")
COMPARED = (
    "algorithms", "densities", "bytes_per_step", "like", "received_bytes_per_step", "like_received", "split",
    "value_code", "index_code", "optimizer", "lr", "num_search_runs", "num_workers", "num_steps", "data",
    "tokens", "device", "seeds",
)  # fmt: skip
TRAINED = ("task", *(name for name in COMPARED if name not in SIMULATED))
FLAGS = {
    "densities": "--density", "num_search_runs": "--search-runs", "num_workers": "--workers",
    "num_steps": "--steps",
}  # fmt: skip
Out = Annotated[Path | None, folder_option(help="Folder of the run; if not given, a new one in out/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the folder's run, or add to it.")]


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
    out: Out = None,
    settings: list[str] | None = None,
    resume: Resume = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Run an experiment and show what came out; every command here has these options."""
    if resume and force:
        raise ArgumentError("give one of --resume and --force, got both: one adds to a run, one replaces it")
    if "task" in (request.base or ()) and any(word.startswith("task=") for word in settings or ()):
        raise ArgumentError("task must be given as the command's own argument, got it with --set")
    for name, value in chosen.items():  # an empty one, or 0, is the task's own in the settings
        if value == "" or (value == "0" and name in ("num_workers", "num_steps")):
            rule = "at least 1, got 0" if value else "given with a value, got ''"
            raise ArgumentError(f"{_flag(name)} must be {rule}")
    given = [f"{name}={value}" for name, value in chosen.items()]
    try:
        config = parse_settings(request.experiment.config, [*given, *(settings or ())], request.base)
    except ArgumentError as error:
        name, _, rule = str(error).partition(" ")
        if name in FLAGS and name in chosen:  # it was typed as an option
            raise ArgumentError(f"{FLAGS[name]} {rule}") from None
        raise
    if "densities" in chosen and getattr(config, "is_at_equal_bytes", False) and not resume:
        raise ArgumentError(f"--density must not stand with a budget of bytes, got {chosen['densities']}")
    typed = ["regtopk", *request.words, *as_typed(chosen, settings or ()), *(["--resume"] if resume else [])]
    folder = out or default_folder(request.name, resume=resume, force=force)
    try:
        with progress_bar(request.name) as progress:
            summary = request.experiment.record(
                config, folder, command=shlex.join(typed), resume=resume, force=force, progress=progress
            )
    except KeyboardInterrupt:
        if isinstance(request.experiment, Comparison) and (folder / CONFIG).exists():
            typer.echo(f"regtopk: {folder} keeps what is done; --resume goes on from there", err=True)
        raise
    show(summary, {request.name: summary}, write_report(folder), as_json=as_json)


def runs(
    config: type, settings: Sequence[str], unused: Sequence[str] = ("task",)
) -> Callable[[Callable[..., Request]], Any]:
    """Make a command of a function that says what to run; it also has options of settings, and of `run`."""
    options = {name: _option(config, name) for name in settings}
    common = {name: p for name, p in inspect.signature(run).parameters.items() if p.kind is p.KEYWORD_ONLY}
    others = ", ".join(f.name for f in fields(config) if f.name not in (*settings, *unused))
    change = typer.Option("--set", metavar="KEY=VALUE", help=f"Change another setting: {others}.")
    common["settings"] = common["settings"].replace(annotation=Annotated[list[str] | None, change])

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
    kind: Any = bool if isinstance(default, bool) else str  # `parse_settings` reads it
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default or "")
    # its sentence in the docstring of its class
    pages = [inspect.cleandoc(part.__doc__ or "") for part in config.__mro__]  # as Python 3.13 has them
    pattern = rf"^ {{4}}{name}: (.*(?:\n {{5,}}.*)*)"
    found = next(filter(None, (re.search(pattern, page, re.MULTILINE) for page in pages)))
    sentence = " ".join(found[1].split())
    text = escape(sentence[0].upper() + sentence[1:])
    return Annotated[kind | None, typer.Option(_flag(name), help=text, show_default=shown or False)]


def _flag(setting: str) -> str:
    return FLAGS.get(setting, f"--{setting.replace('_', '-')}")


def as_typed(chosen: Mapping[str, Any], settings: Sequence[str]) -> list[str]:
    """Settings as one types them."""
    pairs = [[_flag(k)] if v is True else [_flag(k), str(v)] for k, v in chosen.items()]
    return [*chain(*pairs), *chain(*(["--set", setting] for setting in settings))]


def default_folder(name: str, *, resume: bool, force: bool) -> Path:
    """The first of out/NAME, out/NAME-2, out/NAME-3, ... without a run; to resume, the last with one."""
    folder, number = OUT / name, 2
    while not force and (folder / CONFIG).exists():
        following = OUT / f"{name}-{number}"
        if resume and not (following / CONFIG).exists():
            break
        folder, number = following, number + 1
    return folder


def reproduction(experiment: Experiment[Any]) -> Any:
    """The command of one of the paper's experiments: it has the options of its own settings alone."""
    name, presets, words = experiment.name, experiment.presets, ["reproduce", experiment.name]

    def whole() -> Request:
        return Request(experiment, name, words)

    def with_preset(
        preset: Annotated[str, typer.Option(help=f"Protocol: {', '.join(presets)}.")] = (*presets, "")[0],
    ) -> Request:
        check_choice("preset", preset, presets)
        return Request(experiment, f"{name}-{preset}", [*words, "--preset", preset], presets[preset])

    known = {f.name for f in fields(experiment.config)}
    settings = [setting for setting in REPRODUCED if setting in known]
    return runs(experiment.config, settings)(with_preset if presets else whole)


reproduce = typer.Typer(no_args_is_help=True)
for _experiment in EXPERIMENTS.values():
    reproduce.command(_experiment.name, help=f"{_experiment.title}.")(reproduction(_experiment))


@runs(COMPARE.config, COMPARED)
def compare(task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")]) -> Request:
    """Compare methods on a task, at equal density or at equal bytes; write records, figures and a page."""
    return Request(COMPARE, f"compare-{task}", ["compare", task], {"task": task})


@runs(TRAIN.config, TRAINED, unused=SIMULATED)
def train() -> Request:
    """Train with real processes, by a method and dense; write records, figures and a page.

    If you name no method, it is what we advise: consensus:value_code=4bit for digits, and for gpt
    topk:value_code=4bit:impute=0.35:exchange=updates:every=2:fragments=2
    """
    return Request(TRAIN, "train", ["train"])
