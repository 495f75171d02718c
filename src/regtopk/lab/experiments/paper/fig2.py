"""Figure 2: linear regression on workers that disagree, at densities 0.4, 0.5 and 0.6.

What is recorded is the distance ||w^t - w*|| to the minimiser of the mean of the F_n, and how often a single
step made it more than ten times longer: a jump. All data seeds and all methods are one batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from regtopk.algorithms import Dense, GlobalTopK, RegTopK, TopK
from regtopk.core.algorithm import Algorithm, check_density
from regtopk.core.options import check_integer, check_positive
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.experiment import ShowProgress, Summary, WholeExperiment
from regtopk.lab.experiments.settings import parse_seeds, threads_for
from regtopk.lab.experiments.tasks.regression import Regressions, RegressionSettings, draw_regressions
from regtopk.lab.runs import Panel, Record
from regtopk.simulate import Cluster

METHODS = ("dense", "topk", "regtopk", "regtopk-cap", "regtopk-current", "global-topk")
Curves = dict[tuple[str, float], Algorithm[Any]]  # by method and density
TRACKS_WITHIN = 3.0  # times the dense distance: what we call following dense
JUMP = 10.0  # a step that makes the distance so many times longer is a jump


@dataclass(frozen=True)
class Fig2Config(RegressionSettings):
    """Settings of Figure 2.

    Args:
        densities: S = k / J, each in (0, 1] and different.
        num_iterations: T.
        lr: learning rate, > 0.
        mu: RegTop-k's, > 0.
        record_every: iterations between records.
    """

    densities: tuple[float, ...] = (0.4, 0.5, 0.6)
    num_iterations: int = 2500
    lr: float = 0.01
    mu: float = 4.0
    record_every: int = 25

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        for name in ("num_iterations", "record_every"):
            check_integer(name, getattr(self, name), at_least=1)
        for name in ("lr", "mu"):
            check_positive(name, getattr(self, name))
        for density in self.densities:
            check_density(density)
        if not self.densities or len(set(self.densities)) < len(self.densities):
            raise ArgumentError(f"densities must be different and at least one, got {self.densities}")


def algorithms(config: Fig2Config) -> Curves:
    """What runs, by method and density; dense, which has none, runs once, under density 1."""
    table: Curves = {("dense", 1.0): Dense()}
    for density in config.densities:
        table["topk", density] = TopK(density=density)
        table["regtopk", density] = RegTopK(density=density, mu=config.mu)
        table["regtopk-cap", density] = RegTopK(density=density, mu=config.mu, damping="cap")
        table["regtopk-current", density] = RegTopK(density=density, mu=config.mu, reference="current")
        table["global-topk", density] = GlobalTopK(density=density)
    return table


def run(config: Fig2Config, progress: ShowProgress) -> Iterator[Record]:
    """Yield, every so often, each method's distances and jumps, one for each seed, and who follows dense."""
    table = algorithms(config)
    recorded = sorted({*range(0, config.num_iterations, config.record_every), config.num_iterations})
    with threads_for(config.numel):
        descent = CurvesDescent(config, draw_regressions(config), table)
        for iteration in recorded:
            while descent.num_steps < iteration:
                descent.step()
            distances, jumps = (
                dict(zip(table, x.T.tolist(), strict=True)) for x in (descent.distances, descent.num_jumps)
            )
            for method, density in table:
                own = distances[method, density]
                state = {"distance": own, "jumps": jumps[method, density]}
                state["following"] = _num_tracking(own, distances["dense", 1.0])
                for shown_at in config.densities if method == "dense" else (density,):
                    yield {"method": method, "density": shown_at, "iteration": iteration, **state}
            progress(iteration / config.num_iterations)


class CurvesDescent:
    """Gradient descent of M methods on the problems of R seeds: w := w - lr g."""

    def __init__(self, config: Fig2Config, problems: Regressions, table: Curves) -> None:
        self.lr, self.problems = config.lr, problems
        self.clusters = [Cluster(algorithm, num_workers=config.num_workers) for algorithm in table.values()]
        self.models = torch.zeros_like(problems.optimum).unsqueeze(1).repeat(1, len(table), 1)  # (R, M, J)
        self.distances = problems.distances(self.models)  # (R, M)
        self.num_jumps = torch.zeros_like(self.distances, dtype=torch.int64)
        self.num_steps = 0

    @torch.inference_mode()
    def step(self) -> None:
        """One iteration of every method on every seed."""
        grads = self.problems.grads(self.models).unbind(1)
        aggregates = [cluster.step(own) for cluster, own in zip(self.clusters, grads, strict=True)]
        self.models = self.models - self.lr * torch.stack(aggregates, dim=1)
        before, self.distances = self.distances, self.problems.distances(self.models)
        self.num_jumps += self.distances > JUMP * before
        self.num_steps += 1


def summarise(config: Fig2Config, records: Sequence[Record]) -> Summary:
    """Final distances, jumps, and how many seeds follow dense: within three times its distance."""
    num_seeds = len(parse_seeds(config.seeds))
    final: dict[str, dict[str, list[float]]] = {method: {} for method in METHODS}
    jumps: dict[str, dict[str, list[int]]] = {method: {} for method in METHODS}
    for record in records:
        final[record["method"]][str(record["density"])] = record["distance"]
        jumps[record["method"]][str(record["density"])] = record["jumps"]
    num_tracking = {
        method: {key: _num_tracking(distances, final["dense"][key]) for key, distances in by_density.items()}
        for method, by_density in final.items()
    }
    rows: list[dict[str, Any]] = []
    for key in map(str, config.densities):
        distance = {method: median(final[method][key]) for method in METHODS}
        counts = {method: f"{num_tracking[method][key]}/{num_seeds}" for method in METHODS}
        num_jumps = {method: sum(jumps[method][key]) for method in METHODS}
        rows.append({"measure": f"S = {key}, distance", **distance})
        rows.append({"measure": f"S = {key}, following", **counts})
        rows.append({"measure": f"S = {key}, jumps", **num_jumps})
    return {"final_distance": final, "num_tracking_dense": num_tracking, "num_jumps": jumps, "table": rows}


def _num_tracking(distances: list[float], dense: list[float]) -> int:
    return sum(mine <= TRACKS_WITHIN * base for mine, base in zip(distances, dense, strict=True))


def panels(config: Fig2Config) -> Sequence[Panel]:
    """Two for each density: distance against iterations, and how many seeds follow dense."""
    following = f"seeds that follow dense, of {len(parse_seeds(config.seeds))}"
    shown = []
    for d in config.densities:
        title, where, y_label = f"S = {d}", {"density": d}, "distance to the optimum"
        shown += [
            Panel(title, "iteration", "distance", "iteration", y_label, where=where, log_y=True),
            Panel(title, "iteration", "following", "iteration", following, where=where, y_min=0),
        ]
    return shown


FIG2 = WholeExperiment(
    name="fig2",
    title="Figure 2: linear regression, distance to the optimum",
    about=(
        "Workers whose data disagree. Top-k circles the optimum at a distance. At S = 0.6 RegTop-k follows "
        "training without sparsification to iteration 2,500. Single steps throw it back later, and earlier "
        "on some seeds: jumps, which make the distance more than ten times longer. With a cap (regtopk-cap) "
        "it stays. Lines and the table give medians over the data seeds, shades the range. A seed follows "
        "dense while it is within three times its distance."
    ),
    config=Fig2Config,
    run=run,
    summarise=summarise,
    panels=panels,
)
