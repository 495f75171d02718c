"""The paper's second toy example: a step that error accumulation made many times too long.

Worker n's loss is F_n(w) + G(w_2) with G'(1) = 1. While the first entries cancel, Top-1 adds up the second
entry, and then sends the whole sum at once: the learning step is scaled by the number of iterations waited.
The paper leaves G open. Here

    G(w_2) = slope (w_2 - 1) + curvature (w_2 - 1)^2 / 2,      G'(1) = slope = 1

Curvature gives the loss a minimum that one can jump over; 0 is a straight line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from regtopk.core.options import option, within
from regtopk.lab.experiments.experiment import ShowProgress, Summary, WholeExperiment, by_method
from regtopk.lab.experiments.paper.fig1 import ToyConfig, descend, start
from regtopk.lab.experiments.tasks import convex
from regtopk.lab.runs import Panel, Record

# what the paper says of Top-1: nothing for 50 iterations, then (0, 100), "scaled with factor 50"
PAPER = {"num_iterations_waited": 50, "first_aggregate": 100, "first_step_scale": 50}


@dataclass(frozen=True)
class ScalingConfig(ToyConfig):
    """Settings of the second toy example.

    Args:
        slope: G'(1); the paper's is 1.
        curvature: G'', at least 0.
    """

    slope: float = option(1.0, within("(-inf, inf)"))
    curvature: float = option(0.75, within("[0, inf)"))


def risk(config: ScalingConfig, w: Tensor) -> Tensor:
    """F(w) + G(w_2)."""
    return convex.risk(w) + config.slope * (w[1] - 1) + config.curvature * (w[1] - 1) ** 2 / 2


def grads(config: ScalingConfig, w: Tensor) -> Tensor:
    """The workers' gradients, (2, 2)."""
    slope_here = config.slope + config.curvature * (w[1] - 1)
    return convex.grads(w) + torch.stack([torch.zeros_like(slope_here), slope_here])


def run(config: ScalingConfig, progress: ShowProgress) -> Iterator[Record]:
    """Yield, for every method and iteration, the risk and the step taken from there.

    `step_scale` is the length of the step over that of the first step without sparsification.
    """
    unit = config.lr * grads(config, start(config)).mean(0).norm()
    path = descend(config, partial(grads, config), config.num_iterations, progress)
    for method, iteration, w, step in path:
        yield {
            "method": method,
            "iteration": iteration,
            "risk": float(risk(config, w)),
            "w_2": float(w[1]),
            "step_length": float(step.norm()),
            "step_scale": float(step.norm() / unit),
        }


def summarise(config: ScalingConfig, records: Sequence[Record]) -> Summary:
    """How long each method waits, and how long its steps then are."""
    curves = by_method(records)
    moves = {method: [r for r in own if r["step_scale"] > 0] for method, own in curves.items()}
    waited = {method: own[0]["iteration"] if own else None for method, own in moves.items()}
    first_scale = {method: own[0]["step_scale"] for method, own in moves.items() if own}
    longest_scale = {method: max(r["step_scale"] for r in own) for method, own in curves.items()}
    final_risk = {method: own[-1]["risk"] for method, own in curves.items()}
    return {
        "num_iterations_waited": waited,
        "first_step_length": {method: own[0]["step_length"] for method, own in moves.items() if own},
        "first_step_scale": first_scale,
        "longest_step_scale": longest_scale,
        "final_risk": final_risk,
        "paper_topk": PAPER,
        "table": [
            {"measure": "iterations waited", **waited},
            {"measure": "waited, in the paper", "topk": PAPER["num_iterations_waited"]},
            {"measure": "first step, × dense's", **first_scale},
            {"measure": "longest step, × that", **longest_scale},
            {"measure": "final risk", **final_risk},
        ],
    }


def panels(config: ScalingConfig) -> Sequence[Panel]:
    """Two: the lengths of the steps, and the model they lead to."""
    title, y_label = "Length of every step, in units of dense's first", "learning step scaled by"
    return (
        Panel(title, "iteration", "step_scale", "iteration", y_label, log_y=True, marks="stems", y_min=0.1),
        Panel("The entry that matters", "iteration", "w_2", "iteration", "second entry of w"),
    )


SCALING = WholeExperiment(
    name="scaling",
    title="Learning step scaling: waiting makes the step too long",
    about=(
        "The toy problem with a second loss on the entry that matters. Top-1 saves that entry up until it "
        "outgrows the one that cancels, then sends the whole sum as one step, far past the minimum. "
        "RegTop-1 sends it every second iteration, two gradients at a time."
    ),
    config=ScalingConfig,
    run=run,
    summarise=summarise,
    panels=panels,
)
