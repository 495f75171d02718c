"""regtopk plan: is compression worth it on my link?"""

import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from regtopk.cli.parts import Force, Json, progress_bar, say_errors
from regtopk.core.algorithm import check_density
from regtopk.core.link import Link
from regtopk.errors import ArgumentError
from regtopk.plan import cache
from regtopk.plan.calibrate import Machine
from regtopk.plan.costs import Calibration
from regtopk.plan.methods import DENSITIES, Situation, planned_methods
from regtopk.plan.page import table, verdict, write_run
from regtopk.plan.predict import Plan, make_plan
from regtopk.plan.units import format_size, parse_bandwidth, parse_count, parse_size, parse_time
from regtopk.plan.workload import Workload, load_model, measure_step, parse_shape
from regtopk.report import write_report


@say_errors
def plan(
    context: typer.Context,
    bandwidth: Annotated[str, typer.Option(help="Of a worker's link: 100Mbit/s, 1.5G, 12.5MB/s.")],
    workers: Annotated[int, typer.Option(help="How many.")],
    params: Annotated[str | None, typer.Option(help="Parameters of the model: 124M, 11173962.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="PKG.MODULE:CALLABLE", help="Or what returns the model, or it and its inputs."),
    ] = None,
    latency: Annotated[str, typer.Option(help="One way, half a ping: 50us, 10ms.")] = "0",
    step_time: Annotated[
        str | None, typer.Option(help="Of one worker's step without communication: 85ms.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure that here, with --model.")] = False,
    input_shape: Annotated[
        str | None, typer.Option(help="Of the model's input, for --measure: 20,3,32,32.")
    ] = None,
    density: Annotated[str, typer.Option(help="Shares of the entries sent; several with commas.")] = ",".join(
        map(str, DENSITIES)
    ),
    scope: Annotated[str, typer.Option(help="model, or bucket, which overlaps with backward.")] = "model",
    local_workers: Annotated[int, typer.Option(help="How many workers share a machine like this.")] = 1,
    threads: Annotated[int, typer.Option(help="Of each; 0 for torch's own number.")] = 0,
    memory: Annotated[
        str | None, typer.Option(help="What a worker may use for messages; this machine's if not given.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: where gradients are selected and coded.")] = "cpu",
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Measure this machine's costs again.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(help="File of the costs; the user's cache if not given."),
    ] = None,
    show_all: Annotated[
        bool,
        typer.Option("--all", help="Print every density, code and collective, not each method's fastest."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for a page with curves.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Predict every method's step on a link: what is best, from which bandwidth on, and whether it pays."""
    machine = Machine(local_workers, threads, device)
    densities = _densities(density)
    bits_per_s = parse_bandwidth(bandwidth)
    latency_s = parse_time("latency", latency, may_be_zero=True)
    memory_bytes = parse_size("memory", memory) if memory else memory_of_a_worker(local_workers)
    workload, step_time_s = _workload(params, model, step_time, measure, input_shape, device, local_workers)
    situation = Situation(workload, workers, Link(bits_per_s, latency_s, step_time_s), scope)
    costs = _costs(machine, calibration, again=recalibrate)
    found = make_plan(situation, costs, planned_methods(densities), memory_bytes)
    inputs = {
        "params": workload.numel,
        "workers": workers,
        "bandwidth_bits_per_s": bits_per_s,
        "latency_s": latency_s,
        "step_time_s": step_time_s,
        "scope": scope,
        "memory_bytes": memory_bytes,
        "calibration": costs.machine,
    }
    summary = as_summary(found, inputs)
    if out is not None:
        write_run(out, found, costs, summary, command=_as_typed(context), force=force)
        write_report(out)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _show(found, summary["notes"], show_all=show_all)
        typer.echo("" if out is None else f"{out / 'index.html'}", nl=out is not None)


def as_summary(found: Plan, inputs: dict[str, Any]) -> dict[str, Any]:
    """What --json prints."""
    return {
        "inputs": inputs,
        "methods": [found.row(prediction) for prediction in found.predictions],
        "best": found.row(found.best),
        "break_even_bits_per_s": found.break_even_bits_per_s,
        "pays": found.pays,
        "notes": notes(found, inputs["memory_bytes"]),
    }


def notes(found: Plan, memory_bytes: float) -> list[str]:
    """What one should know beside the numbers."""
    said = [
        "A faster step is not a better one: at a lower density, or with fewer bits, training may need more "
        "steps (docs/comparisons.md).",
    ]
    if found.left_out:
        worst = max(found.left_out, key=lambda p: p.memory_bytes)
        said.append(
            f"Left out: {len(found.left_out)} ways for which the messages of {found.situation.num_workers} "
            f"workers do not fit {format_size(memory_bytes)} of memory; the most, "
            f"{format_size(worst.memory_bytes)}, takes {worst.method.name} at density "
            f"{worst.method.density:g} by {worst.method.collective}."
        )
    return said


def memory_of_a_worker(local_workers: int) -> float:
    """This machine's memory, shared evenly."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_workers


def _densities(text: str) -> list[float]:
    try:
        return [check_density(float(part)) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"density must be numbers in (0, 1] with commas, got {text!r}") from None


def _workload(
    params: str | None,
    model: str | None,
    step_time: str | None,
    measure: bool,
    input_shape: str | None,
    device: str,
    local_workers: int,
) -> tuple[Workload, float]:
    """The gradients, and the seconds of a step without an exchange."""
    if (params is None) == (model is None):
        raise ArgumentError(f"give exactly one of --params and --model, got {params!r} and {model!r}")
    if (step_time is None) != measure:
        raise ArgumentError(f"give exactly one of --step-time and --measure, got {step_time!r} and {measure}")
    if measure and local_workers > 1:
        raise ArgumentError(
            "--measure times a worker that has this machine to itself: give --step-time where several share "
            f"it, got --local-workers {local_workers}"
        )
    if step_time is not None:
        step_time_s = parse_time("step time", step_time)
    if model is None:
        assert params is not None
        if measure:
            raise ArgumentError("--measure needs --model, got --params")
        return Workload.of_size(parse_count("params", params)), step_time_s
    network, inputs = load_model(model)
    workload = Workload.of_model(network)
    if not measure:
        return workload, step_time_s
    if input_shape is not None:
        inputs = (torch.randn(parse_shape(input_shape)),)
    if inputs is None:
        raise ArgumentError(
            f"--measure needs the model's inputs: --input-shape 20,3,32,32, or a {model!r} that returns "
            "(model, inputs), got neither"
        )
    return workload, measure_step(network, inputs, device)


def _costs(machine: Machine, path: Path | None, *, again: bool) -> Calibration:
    if path is not None and not again:
        return cache.read(path)
    path = path or cache.cache_path(machine)
    if again or not path.exists():
        typer.echo(
            f"regtopk: measuring what work costs on this machine, once, for a minute or two ({path})",
            err=True,
        )
    with progress_bar("calibration") as progress:
        return cache.calibration_of(machine, path, again=again, progress=progress)


def _show(found: Plan, said: list[str], *, show_all: bool) -> None:
    """A row for each name, and the answer."""
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    every = sorted(found.predictions, key=lambda p: p.step_time_s)
    rows = table(found, every if show_all else found.fastest_by_name())
    for column in rows[0]:
        is_number = column in ("payload", "step", "speed-up")
        shown.add_column(
            "method" if column == "measure" else column, justify="right" if is_number else "left"
        )
    for row in rows:
        shown.add_row(*map(str, row.values()))
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    console.print(shown)
    typer.echo(verdict(found))
    for note in said:
        typer.echo(note)


def _as_typed(context: typer.Context) -> str:
    """The command as it was typed, but for what does not change the plan."""
    words = ["regtopk", "plan"]
    for option in context.command.params:
        value = context.params.get(option.name or "")
        is_default = value is None or value == option.get_default(context)
        if not is_default and option.name not in ("out", "force", "as_json", "show_all", "recalibrate"):
            words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    return shlex.join(words)
