"""Draw the figures of docs/why.md, and print what it says about Figure 2: python tools/why.py."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from regtopk.algorithms import RegTopK
from regtopk.core import to_dense
from regtopk.lab.experiments.paper.fig2 import JUMP, Fig2Config, regressions_of
from regtopk.lab.experiments.tasks.convex import Regressions
from regtopk.lab.report.figure import Drawing, draw_all, save_png
from regtopk.lab.report.panels import label_log_axis, line_of
from regtopk.lab.report.style import DASH_DOT, DOTS, INK, METHODS, SPARE, Style
from regtopk.simulate import Cluster

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
FIG2 = Fig2Config(seeds="4", num_iterations=4000, densities=(0.6,))
PLAIN = 1e-30  # a mu so small that RegTop-k is Top-k
CASES = {
    "Top-k, S = 0.6": RegTopK(density=0.6, mu=PLAIN),
    "RegTop-k, S = 0.4": RegTopK(density=0.4, mu=FIG2.mu),
    "RegTop-k, S = 0.5": RegTopK(density=0.5, mu=FIG2.mu),
    "RegTop-k with a cap, S = 0.6": RegTopK(density=0.6, mu=FIG2.mu, damping="cap"),
    "RegTop-k, S = 0.6": RegTopK(density=0.6, mu=FIG2.mu),
}
END = 2500  # where the paper's figure ends
PANEL_INCHES = (4.5, 3.3)
NOTE_POINTS = 8.5  # size of words in a panel
SEEDS = [Style(f"seed {seed}", *SPARE[spare], width=1.6) for seed, spare in enumerate((4, 0, 1, 9))]
READINGS = {
    "previous": Style("previous", METHODS["regtopk"].light, METHODS["regtopk"].dark, width=2.0),
    "current": METHODS["regtopk-current"],
}
FACTORS = {  # by mu
    PLAIN: Style("Top-k (mu to 0)", METHODS["topk"].light, METHODS["topk"].dark, DOTS, width=2.4),
    1.0: Style("mu = 1", *SPARE[1], DASH_DOT, width=2.0),
    4.0: Style("mu = 4", METHODS["regtopk"].light, METHODS["regtopk"].dark, width=2.0),
}


class Step(NamedTuple):
    """What happened in one iteration, on R seeds."""

    own: Tensor  # w a^t of each worker, (R, N, J)
    aggregate: Tensor  # g^t, (R, 1, J)
    is_sent: Tensor  # by each worker, (R, N, J)

    @property
    def is_partly_sent(self) -> Tensor:
        """By some workers and not by all, (R, J)."""
        return self.is_sent.any(-2) & ~self.is_sent.all(-2)


class Jump(NamedTuple):
    """A step away from the optimum, and the entries that only some workers sent in it."""

    seed: int
    iteration: int
    before: float
    after: float
    num_senders: list[int]
    common: list[float]  # |g^{t-1}| over the iterations it had gathered


@dataclass
class Watched:
    """One method of Figure 2: of every iteration and seed, except for `error`, which is of seed 0."""

    distance: list[list[float]] = field(default_factory=list)
    num_by_all: list[list[int]] = field(default_factory=list)
    num_by_some: list[list[int]] = field(default_factory=list)
    error: list[dict[str, float]] = field(default_factory=list)  # of each reading, from iteration 2 on
    jumps: list[Jump] = field(default_factory=list)


@torch.inference_mode()
def watch(config: Fig2Config, problems: Regressions, algorithm: RegTopK) -> Watched:
    """Run RegTop-k on Figure 2's regressions, and look at every step as no worker can."""
    cluster, seen = Cluster(algorithm, num_workers=config.num_workers), Watched()
    models = torch.zeros_like(problems.optimum)
    last = None
    for _ in range(config.num_iterations):
        grads = problems.grads(models.unsqueeze(1)).squeeze(1)
        residual = 0 if cluster.state is None else cluster.state.state_dict()["residual"]
        own = (residual + grads) / config.num_workers
        aggregate = cluster.step(grads)
        models = models - config.lr * aggregate
        step = Step(own, aggregate.unsqueeze(-2), _is_sent(cluster, config.numel))
        seen.distance.append((models - problems.optimum).norm(dim=-1).tolist())
        seen.num_by_all.append(step.is_sent.all(-2).sum(-1).tolist())
        seen.num_by_some.append(step.is_partly_sent.sum(-1).tolist())
        if last is not None:
            seen.error.append(_errors(step, last))
            seen.jumps += jumps_of(seen.distance, step, last)
        last = step
    return seen


def _is_sent(cluster: Cluster, numel: int) -> Tensor:
    """Which entries each worker sent in the last step, (..., N, J)."""
    assert cluster.state is not None
    indices = cluster.state.state_dict()["indices"]
    return to_dense(indices, torch.ones_like(indices, dtype=torch.bool), numel)


def _errors(step: Step, last: Step) -> dict[str, float]:
    """How far each reading's guess at the whole sum is off, over w |a^t|, where seed 0 sent last."""
    total = step.own.sum(-2, keepdim=True)
    guesses = {
        "previous": last.aggregate * step.own / last.own,
        "current": step.own + last.aggregate - last.own,
    }
    errors = {reading: ((guess - total) / step.own).abs()[0] for reading, guess in guesses.items()}
    return {reading: float(error[last.is_sent[0]].median()) for reading, error in errors.items()}


def jumps_of(distance: list[list[float]], step: Step, last: Step) -> Iterator[Jump]:
    """The seeds whose last step was a jump."""
    for seed, (before, after) in enumerate(zip(*distance[-2:], strict=True)):
        if after > JUMP * before:
            there = step.is_partly_sent[seed]
            num_senders = step.is_sent[seed].sum(0)[there]
            num_gathered = (last.own / step.own)[seed].median(0).values.round()
            common = (last.aggregate[seed, 0] / num_gathered).abs()[there]
            yield Jump(seed, len(distance), before, after, num_senders.tolist(), common.tolist())


def draw_consensus(watched: Watched, picture: Path) -> None:
    """The distance, the entries that only some workers send, and what each reading predicts."""
    drawings = [
        Drawing("Distance to the optimum", PANEL_INCHES, partial(_draw_seeds, watched.distance)),
        Drawing("Entries that only some workers send, of 100", PANEL_INCHES, partial(_draw_partly, watched)),
        Drawing("Median |guess - sum| / (w |a|), seed 0", PANEL_INCHES, partial(_draw_error, watched)),
    ]
    save_png(draw_all(drawings, SEEDS), picture)


def _draw_seeds(values: Sequence[Sequence[float]], axes: "Axes") -> None:
    for style, curve in zip(SEEDS, zip(*values, strict=True), strict=False):
        axes.plot(range(1, len(curve) + 1), curve, **line_of(style))
    axes.set_yscale("log")
    label_log_axis(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel("iteration")


def _draw_partly(watched: Watched, axes: "Axes") -> None:
    _draw_seeds(watched.num_by_some, axes)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_yticks([0, 1, 2, 5, 10, 20, 50, 100], ["0", "1", "2", "5", "10", "20", "50", "100"])
    axes.set_ylim(bottom=-0.15)


def _draw_error(watched: Watched, axes: "Axes") -> None:
    for reading, style in READINGS.items():
        error = [of[reading] for of in watched.error]
        axes.plot(range(2, len(error) + 2), error, **line_of(style))
        axes.annotate(
            reading,
            (len(error) / 2, error[len(error) // 2]),
            (6, 4),
            textcoords="offset points",
            color=style.light,
        )
    axes.set_yscale("log")
    label_log_axis(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel("iteration")


def draw_score(picture: Path) -> None:
    """The factor of an entry that was sent last, and its score, which saturates."""
    drawings = [
        Drawing("Factor of an entry sent last", PANEL_INCHES, _draw_factor),
        Drawing("Its score, if a has not changed", PANEL_INCHES, _draw_saturation),
    ]
    save_png(draw_all(drawings, list(FACTORS.values())), picture)


def _draw_factor(axes: "Axes") -> None:
    x = torch.logspace(-2, 2, 200, dtype=torch.float64)
    for mu, style in FACTORS.items():
        axes.plot(x.tolist(), (x / mu).tanh().tolist(), **line_of(style))
    axes.set_xscale("log")
    label_log_axis(axes.xaxis, *axes.get_xlim())
    _note_at_one(axes)
    axes.set_xlabel("|1 + D| = |g| / (w |a|)")
    axes.set_ylabel("tanh(|1 + D| / mu)")


def _note_at_one(axes: "Axes") -> None:
    axes.plot([1.0] * 2, [math.tanh(1 / mu) for mu in (1.0, 4.0)], "o", ms=5, color=INK[0], zorder=4)
    axes.annotate(
        "sent by this\nworker alone",
        (1.0, math.tanh(1.0)),
        (-62, 14),
        textcoords="offset points",
        fontsize=NOTE_POINTS,
    )


def _draw_saturation(axes: "Axes") -> None:
    own = torch.logspace(-2, 2, 200, dtype=torch.float64)  # |a|, in units of |g| / w
    for mu, style in FACTORS.items():
        axes.plot(own.tolist(), (own * (1 / (own * mu)).tanh()).tolist(), **line_of(style))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.text(1.2, 0.31, "|g| / (w mu), whatever a is", fontsize=NOTE_POINTS)
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        label_log_axis(axis, *limits)
    axes.set_xlabel("own |a|, in units of |g| / w")
    axes.set_ylabel("score, in the same units")


def main() -> None:
    """Draw the figures; print who sends what, the errors of both readings, and the jumps."""
    torch.set_num_threads(1)
    draw_score(FIGURES / "why-score.png")
    problems = regressions_of(FIG2)
    for name, algorithm in CASES.items():
        watched = watch(FIG2, problems, algorithm)
        by_all = sum(watched.num_by_all[END - 1]) / len(watched.distance[0])
        print(f"{name}, iteration {END}: all send {by_all:g}, distance {max(watched.distance[END - 1]):.1e}")
        print(f"    at the end: {len(watched.jumps)} jumps, distance {max(watched.distance[-1]):.1e}")
    draw_consensus(watched, FIGURES / "why-consensus.png")  # of the last of them
    for iteration in (10, 100, 1000, END):
        print(f"iteration {iteration}, error of the guess: {watched.error[iteration - 2]}")
    for jump in watched.jumps:
        print(f"{jump}, in bits: {', '.join(map(float.hex, jump.common))}")


if __name__ == "__main__":
    main()
