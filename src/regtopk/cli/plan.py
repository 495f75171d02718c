"""regtopk plan: is compression worth it on my link?"""

import logging
import os
import shlex
from pathlib import Path
from typing import Annotated

import torch
import typer

from regtopk.cli.experiments import as_typed
from regtopk.cli.parts import Force, Json, folder_option, progress_bar, say_errors, show
from regtopk.core.algorithm import check_density
from regtopk.core.link import Link
from regtopk.core.options import check_choice, read_number
from regtopk.errors import ArgumentError, OutputError, StateError
from regtopk.lab.experiments.settings import check_device
from regtopk.lab.plan import page
from regtopk.lab.plan.calibrate import calibrate
from regtopk.lab.plan.costs import RECORDED, Calibration, cache_path
from regtopk.lab.plan.exchange import Workload
from regtopk.lab.plan.learning import OPTIMIZERS
from regtopk.lab.plan.methods import DENSITIES, UPDATES_DENSITIES, planned_methods
from regtopk.lab.plan.predict import Situation, make_plan
from regtopk.lab.plan.units import parse_bandwidth, parse_count, parse_time
from regtopk.lab.report import write_report

SHOWN_DENSITIES = "; of updates ".join(",".join(map(str, each)) for each in (DENSITIES, UPDATES_DENSITIES))
USUAL_DEVICE = "cuda if torch finds a GPU, or above 100M parameters"
SHOWN_ONLY = ("out", "force", "as_json", "recalibrate")  # options that do not change the plan


@say_errors
def plan(
    context: typer.Context,
    params: Annotated[str, typer.Option(help="Number of parameters: 124M, 11173962.")],
    workers: Annotated[str, typer.Option(help="Number of workers.")],
    bandwidth: Annotated[str, typer.Option(help="Bandwidth of a worker's link: 100Mbit/s, 1.5G, 12.5MB/s.")],
    step_time: Annotated[str, typer.Option(help="One worker's step without communication: 85ms.")],
    latency: Annotated[str, typer.Option(help="One way, half a ping: 50us, 10ms.")] = "0",
    exchange: Annotated[
        str | None, typer.Option(help="gradients or updates.", show_default="updates for adamw and muon")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help=", ".join(OPTIMIZERS) + ".", show_default="sgd for gradients, adamw for updates"),
    ] = None,
    every: Annotated[str | None, typer.Option(help="Steps from one exchange of updates to the next.")] = None,
    density: Annotated[str | None, typer.Option(help="Shares sent.", show_default=SHOWN_DENSITIES)] = None,
    algorithms: Annotated[
        str | None, typer.Option(help="Methods as compare takes them: topk,topk:exchange=updates:every=2.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default=USUAL_DEVICE)] = None,
    recalibrate: Annotated[bool, typer.Option("--recalibrate", help="Measure the costs again.")] = False,
    calibration: Annotated[Path | None, typer.Option(help="File of the costs; else the cache.")] = None,
    out: Annotated[Path | None, folder_option(help="Folder for a page with curves.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Predict the methods' steps on a link: what is best, whether it pays, and below which bandwidth."""
    check_choice("device", device or "cpu", ("cpu", "cuda"))
    densities = None if density is None else _densities(density)
    labels = None if algorithms is None else algorithms.split(",")
    num_workers = parse_count("workers", workers)
    steps = None if every is None else parse_count("every", every)
    if optimizer is not None:
        check_choice("optimizer", optimizer, OPTIMIZERS)
    exchange = exchange or ("gradients" if optimizer in (None, "sgd") else "updates")
    methods = planned_methods(
        densities, labels, exchange=exchange, every=steps, optimizer=optimizer or "", num_workers=num_workers
    )
    optimizer = optimizer or ("adamw" if any(method.rounds.has_updates for method in methods) else "sgd")
    latency_s = parse_time("latency", latency, may_be_zero=True)
    link = Link(parse_bandwidth(bandwidth), latency_s, parse_time("step time", step_time))
    workload = Workload.of_size(parse_count("params", params))
    situation = Situation(workload, num_workers, link, optimizer)
    on, why = (device, "as asked") if device else _usual_device(workload.numel)
    why = f"the costs in {calibration}" if calibration and not recalibrate else why
    is_there = on == "cpu" or torch.cuda.is_available()
    path = calibration or (cache_path(on) if is_there else RECORDED)
    try:
        is_kept = not recalibrate and (calibration is not None or path.exists())
        costs = Calibration.read(path) if is_kept else _measured(on, path)
        found = make_plan(situation, costs, methods)
    except StateError as error:
        raise StateError(f"{error}; --recalibrate measures this machine and writes the file anew") from error
    inputs = {
        "params": workload.numel,
        "workers": num_workers,
        "bandwidth_bits_per_s": link.bandwidth,
        "latency_s": link.latency_s,
        "step_time_s": link.compute_s,
        "exchange": exchange,
        "optimizer": optimizer,
        "every": steps,
        "calibration": costs.machine,
    }
    summary = page.summary(found, inputs, page.basis(costs.machine, why, is_there or calibration is not None))
    written = None
    if out is not None:
        defaults = {option.name: option.get_default(context) for option in context.command.params}
        typed = {k: v for k, v in context.params.items() if k not in SHOWN_ONLY and v != defaults[k]}
        command = shlex.join(["regtopk", "plan", *as_typed(typed, [])])
        page.write_run(out, found, costs, summary, command=command, force=force)
        written = write_report(out)
    if not as_json:
        typer.echo(summary["basis"])
    where = ", ".join(f"{name} {value}" for name, value in costs.machine.items() if name != "assumed")
    answer = [page.verdict(found), *summary["notes"], f"Costs: {path} ({where})"]
    show(summary, {"plan": {"table": page.table(found), "notes": answer}}, written, as_json=as_json)


def _densities(text: str) -> list[float]:
    try:
        return [check_density(read_number(float, part)) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"density must be numbers in (0, 1], separated by commas, got {text!r}") from None


def _usual_device(numel: int) -> tuple[str, str]:
    """What is planned for unless told, and why."""
    if torch.cuda.is_available():
        return "cuda", "torch finds one"
    if numel > 100_000_000:
        return "cuda", "more than 100M parameters; --device cpu plans for CPUs"
    return "cpu", "no GPU here, and at most 100M parameters; --device cuda plans for GPUs"


def _measured(device: str, path: Path) -> Calibration:
    """This machine's costs, which are kept in a file."""
    check_device("device", device)
    typer.echo(f"regtopk: measuring what work costs on this machine, for about a minute ({path})", err=True)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # not on Windows
    busy = f"load {load:.1f}" if load > 0.5 * (os.cpu_count() or 1) else ""
    if busy:
        typer.echo(f"regtopk: the machine is busy ({busy}), costs are too high: --recalibrate", err=True)
    with progress_bar("calibration") as progress:
        costs = calibrate(device, progress)
    if busy:
        costs.machine["busy"] = busy
    try:
        costs.write(path)
    except OutputError as error:
        logging.getLogger("regtopk").warning("%s: the next plan measures again", error)
    return costs
