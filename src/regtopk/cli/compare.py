"""regtopk compare: many methods on one task."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from regtopk.cli.parts import Force, Json, Settings, as_typed, progress_bar, say_errors, show
from regtopk.experiments import parse_settings
from regtopk.experiments.compare import COMPARE
from regtopk.experiments.tasks import TASKS
from regtopk.report import write_report

OPTIONS = {
    "algorithms": "--algorithms",
    "densities": "--density",
    "bytes_per_step": "--bytes-per-step",
    "like": "--like",
    "split": "--split",
    "value_code": "--value-code",
    "index_code": "--index-code",
    "optimizer": "--optimizer",
    "lr": "--lr",
    "num_seeds": "--seeds",
    "num_workers": "--workers",
    "num_steps": "--steps",
    "data": "--data",
    "device": "--device",
}


def _option(field: str, text: str) -> Any:
    default = getattr(COMPARE.config, field)
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    return typer.Option(OPTIONS[field], help=text, show_default=str(shown) if shown else False)


@say_errors
def compare(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    algorithms: Annotated[
        str | None, _option("algorithms", "NAME[:OPTION=VALUE]... with commas; every algorithm if not given.")
    ] = None,
    density: Annotated[
        str | None, _option("densities", "Share of the entries sent; several with commas.")
    ] = None,
    bytes_per_step: Annotated[
        float | None, _option("bytes_per_step", "Mean payload a worker and step, instead of a density.")
    ] = None,
    like: Annotated[
        str | None, _option("like", "Sets it from a method, such as topk:0.001:raw32:float32.")
    ] = None,
    split: Annotated[str | None, _option("split", "iid, sorted[:SHARDS] or dirichlet[:ALPHA].")] = None,
    value_code: Annotated[str | None, _option("value_code", "How values travel.")] = None,
    index_code: Annotated[str | None, _option("index_code", "How indices travel.")] = None,
    optimizer: Annotated[str | None, _option("optimizer", "sgd, momentum or adam.")] = None,
    lr: Annotated[str | None, _option("lr", "Learning step length; several are searched, by method.")] = None,
    seeds: Annotated[int | None, _option("num_seeds", "How many seeds, from 0 on.")] = None,
    workers: Annotated[int | None, _option("num_workers", "How many simulated workers.")] = None,
    steps: Annotated[int | None, _option("num_steps", "How many steps.")] = None,
    data: Annotated[str | None, _option("data", "Where the data set is.")] = None,
    device: Annotated[str | None, _option("device", "cpu or cuda.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; out/compare-TASK if not given.")
    ] = None,
    settings: Settings = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compare methods on a task, at equal density or at equal bytes; write records, figures and a page."""
    given = {
        "algorithms": algorithms,
        "densities": density,
        "bytes_per_step": bytes_per_step,
        "like": like,
        "split": split,
        "value_code": value_code,
        "index_code": index_code,
        "optimizer": optimizer,
        "lr": lr,
        "num_seeds": seeds,
        "num_workers": workers,
        "num_steps": steps,
        "data": data,
        "device": device,
    }
    chosen = [f"{name}={value}" for name, value in given.items() if value is not None]
    chosen += settings or ()
    config = parse_settings(COMPARE.config, [f"task={task}", *chosen])
    command = shlex.join(["regtopk", "compare", task, *as_typed(chosen, OPTIONS)])
    folder = out or Path("out") / f"compare-{task}"
    with progress_bar(f"compare {task}") as progress:
        summary = COMPARE.record(config, folder, command=command, force=force, progress=progress)
    show(summary, {task: summary}, write_report(folder), as_json=as_json)
