"""`regtopk doctor`: what runs here, why, and whether it agrees with the reference."""

import json
from typing import Annotated, Any

import torch
import typer

from regtopk import kernels
from regtopk.cli.parts import Json, say_errors
from regtopk.core.options import counted
from regtopk.lab.runs import versions


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
        _show(found)
    if any(device["failure"] is not None for device in devices):
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> None:
    typer.echo(f"regtopk {found['regtopk']}, torch {found['torch']}, Python {found['python']}")
    typer.echo(f"{counted(found['num_threads'], 'thread')} on {found['machine']}")
    for device in found["devices"]:
        typer.echo(f"{device['device']} ({device['name']}): {device['kernel']} kernels: {device['reason']}")
        if device["kernel"] == "reference":
            typer.echo("  which is what other kernels are compared with")
        elif device["failure"] is None:
            typer.echo(f"  agrees with the reference in {counted(device['num_cases'], 'random case')}")
        else:
            typer.echo(f"  DIFFERS from the reference at {device['failure']}", err=True)
