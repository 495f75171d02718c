"""regtopk plan: is compression worth it on my link?"""

import logging
import os
import shlex
from pathlib import Path
from typing import Annotated

import torch
import typer

from regtopk.algorithms import ALGORITHMS
from regtopk.cli.parts import Force, Json, progress_bar, say_errors, show
from regtopk.core.algorithm import check_density
from regtopk.core.link import Link
from regtopk.core.options import check_choice
from regtopk.errors import ArgumentError, OutputError, StateError
from regtopk.lab.plan import page
from regtopk.lab.plan.calibrate import Machine, calibrate
from regtopk.lab.plan.costs import Calibration
from regtopk.lab.plan.learning import Optimizer
from regtopk.lab.plan.methods import (
    DENSITIES,
    UPDATES_DENSITIES,
    advised_labels,
    planned_methods,
    update_labels,
)
from regtopk.lab.plan.predict import Situation, make_plan
from regtopk.lab.plan.units import parse_bandwidth, parse_count, parse_size, parse_time
from regtopk.lab.plan.workload import Workload, load_model, measure_step, parse_shape
from regtopk.lab.report import write_report
from regtopk.rounds import EXCHANGES, Rounds


@say_errors
def plan(
    context: typer.Context,
    bandwidth: Annotated[str, typer.Option(help="Bandwidth of a worker's link: 100Mbit/s, 1.5G, 12.5MB/s.")],
    workers: Annotated[int, typer.Option(help="Number of workers.")],
    params: Annotated[str | None, typer.Option(help="Number of parameters: 124M, 11173962.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="PKG.MODULE:CALLABLE", help="Returns the model, or it and its inputs."),
    ] = None,
    latency: Annotated[str, typer.Option(help="One way, half a ping: 50us, 10ms.")] = "0",
    step_time: Annotated[
        str | None, typer.Option(help="One worker's step without communication: 85ms.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the step time here.")] = False,
    input_shape: Annotated[
        str | None, typer.Option(help="Shape of the model's input, for --measure: 20,3,32,32.")
    ] = None,
    density: Annotated[
        str | None, typer.Option(help="Shares of entries to send: 0.001,0.01,0.1, or 0.01 of updates.")
    ] = None,
    local_workers: Annotated[int, typer.Option(help="How many workers share a machine like this.")] = 1,
    threads: Annotated[int, typer.Option(help="Threads per worker; 0 for torch's own number.")] = 0,
    memory: Annotated[
        str | None, typer.Option(help="Memory for a worker's messages; this machine's if not given.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda: where gradients are selected and coded.")] = "cpu",
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Measure this machine's costs again.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="File of the costs; the user's cache if not given.")
    ] = None,
    exchange: Annotated[
        str, typer.Option(help="gradients, or updates: what every worker's own optimizer changed.")
    ] = "gradients",
    every: Annotated[
        int | None, typer.Option(help="Optimizer steps from one exchange of updates to the next.")
    ] = None,
    delay: Annotated[
        int, typer.Option(help="Optimizer steps that an exchange of updates may travel beside.")
    ] = 0,
    fragments: Annotated[
        int | None, typer.Option(help="Parts of the model that take turns, in an exchange of updates.")
    ] = None,
    algorithms: Annotated[
        str | None, typer.Option(help="Methods as compare takes them: topk,topk:exchange=updates:every=2.")
    ] = None,
    plan_all: Annotated[
        bool, typer.Option("--all", help="Rank every algorithm, not only those one would try first.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for a page with curves.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Predict the methods' steps on a link: what is best, from which bandwidth on, and whether it pays."""
    machine = Machine(local_workers, threads, device)
    labels = _labels(algorithms, exchange, every, delay, fragments, plan_all=plan_all)
    usual = UPDATES_DENSITIES if exchange == "updates" else DENSITIES
    densities = usual if density is None else _densities(density)
    methods = planned_methods(densities, every=plan_all, labels=labels)
    bits_per_s = parse_bandwidth(bandwidth)
    latency_s = parse_time("latency", latency, may_be_zero=True)
    memory_bytes = parse_size("memory", memory) if memory else memory_of_a_worker(local_workers)
    if (params is None) == (model is None):
        raise ArgumentError(f"give --params or --model, got {'neither' if params is None else 'both'}")
    if (step_time is None) != measure:
        got = "both" if measure else "neither"
        raise ArgumentError(f"give --step-time, or --model with --measure, got {got}")
    step_time_s = None if step_time is None else parse_time("step time", step_time)
    if model is not None:
        workload, step_time_s = _of_model(model, step_time_s, input_shape, machine)
    elif params is not None and step_time_s is not None:
        workload = Workload.of_size(parse_count("params", params))
    else:
        raise ArgumentError("--measure needs --model, got --params")
    optimizer: Optimizer = "adamw" if any(method.rounds.has_updates for method in methods) else "sgd"
    situation = Situation(workload, workers, Link(bits_per_s, latency_s, step_time_s), optimizer)
    try:
        lines = set[str]().union(*(situation.exchange(method).lines for method in methods))
        costs = _costs(machine, calibration, lines, again=recalibrate)
        found = make_plan(situation, costs, methods, memory_bytes)
    except StateError as error:
        raise StateError(f"{error}; --recalibrate measures this machine and writes the file anew") from error
    inputs = {
        "params": workload.numel,
        "workers": workers,
        "bandwidth_bits_per_s": bits_per_s,
        "latency_s": latency_s,
        "step_time_s": step_time_s,
        "exchange": exchange,
        "every": every,
        "delay": delay,
        "fragments": fragments,
        "memory_bytes": memory_bytes,
        "calibration": costs.machine,
    }
    summary = page.summary(found, inputs)
    written = None
    if out is not None:
        page.write_run(out, found, costs, summary, command=_as_typed(context), force=force)
        written = write_report(out)
    where = ", ".join(f"{name} {value}" for name, value in costs.machine.items() if value is not None)
    source = f"Measured costs: {calibration or machine.path} ({where})"
    answer = [page.verdict(found), *summary["notes"], source]
    show(summary, {"plan": {"table": page.table(found)}}, written, as_json=as_json, notes=answer)


def memory_of_a_worker(local_workers: int) -> float:
    """This machine's memory, shared evenly."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local_workers


def _densities(text: str) -> list[float]:
    try:
        return [check_density(float(part)) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"density must be numbers in (0, 1], separated by commas, got {text!r}") from None


def _labels(
    algorithms: str | None,
    exchange: str,
    every: int | None,
    delay: int,
    fragments: int | None,
    *,
    plan_all: bool,
) -> list[str]:
    """The methods that were asked for, in words; none if those one would try first are to be planned."""
    check_choice("exchange", exchange, EXCHANGES)
    for name, value, usual in (("every", every, None), ("delay", delay, 0), ("fragments", fragments, None)):
        if exchange != "updates" and value != usual:
            raise ArgumentError(f"--{name} needs --exchange updates, got --{name} {value}")
    parts = 1 if fragments is None else fragments
    least = max(1, delay + 1, parts)
    Rounds(exchange, least if every is None else every, delay=delay, fragments=parts).check_times()
    if algorithms is not None and plan_all:
        raise ArgumentError("give --algorithms or --all, got both")
    if exchange == "gradients":
        return algorithms.split(",") if algorithms else []
    times = every, delay, fragments
    if algorithms is None:
        others = [name for name in ALGORITHMS if name != "dense"] if plan_all else []
        return [*advised_labels(*times), *update_labels(others, *times)]
    told = [label for label in algorithms.split(",") if "exchange=" in label]
    return told + update_labels([label for label in algorithms.split(",") if label not in told], *times)


def _of_model(
    spec: str, step_time_s: float | None, input_shape: str | None, machine: Machine
) -> tuple[Workload, float]:
    """A model's gradients, and the seconds of its step without an exchange, measured here if not told."""
    if step_time_s is None and machine.local_workers > 1:
        raise ArgumentError(
            "--measure times a worker that has this machine to itself: give --step-time where several share "
            f"it, got --local-workers {machine.local_workers}"
        )
    model, inputs = load_model(spec)
    workload = Workload.of_model(model)
    if step_time_s is not None:
        return workload, step_time_s
    if input_shape is not None:
        inputs = (torch.randn(parse_shape(input_shape)),)
    if inputs is None:
        raise ArgumentError(
            f"--measure needs the model's inputs: --input-shape 20,3,32,32, or a {spec!r} that returns "
            "(model, inputs), got neither"
        )
    return workload, measure_step(model, inputs, machine.device)


def _costs(machine: Machine, given: Path | None, lines: set[str], *, again: bool) -> Calibration:
    """The costs in a file. What the cache lacks is measured and kept; a file that is given stays as it is."""
    path = given or machine.path
    known = Calibration(machine.describe(), {})
    if not again and (given is not None or path.exists()):
        known = Calibration.read(path)
        if given is not None or lines <= known.lines.keys():
            return known
    typer.echo(f"regtopk: measuring what work costs on this machine, for up to a minute ({path})", err=True)
    with progress_bar("calibration") as progress:
        known.lines.update(calibrate(machine, lines - known.lines.keys(), progress))
    try:
        known.write(path)
    except OutputError as error:
        logging.getLogger("regtopk").warning("%s: the next plan measures again", error)
    return known


def _as_typed(context: typer.Context) -> str:
    """The command as it was typed, but for what does not change the plan."""
    words = ["regtopk", "plan"]
    for option in context.command.params:
        value = context.params.get(option.name or "")
        is_default = value is None or value == option.get_default(context)
        if not is_default and option.name not in ("out", "force", "as_json", "recalibrate"):
            words += [option.opts[0]] if value is True else [option.opts[0], str(value)]
    return shlex.join(words)
