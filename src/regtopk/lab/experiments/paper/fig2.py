"""Figure 2: linear regression on workers that disagree (Section 4.1), at densities 0.4, 0.5 and 0.6.

    X_n iid N(0, 1), (D, J);  t_n iid N(u_n, 1), u_n ~ N(0, 5);  y_n = X_n t_n + N(0, 0.5)
    F_n(w) = ||X_n w - y_n||^2 / (2 D),   w_n = 1/N,   full batches, w^0 = 0

What is recorded is the distance ||w^t - w*|| to the minimiser of the mean of the F_n, and how often a single
step made it more than ten times longer: a jump. The gradients X_n^T (X_n w - y_n) / D = A_n w - b_n of all
methods and all data seeds are one product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from regtopk.algorithms import Dense, GlobalTopK, RegTopK, TopK
from regtopk.core.algorithm import Algorithm
from regtopk.core.options import check_integer, check_options, integer, option, within
from regtopk.lab.experiments.experiment import ShowProgress, Summary, WholeExperiment
from regtopk.lab.experiments.settings import check_densities, check_device, parse_seeds, threads_for
from regtopk.lab.experiments.tasks.convex import Regressions, draw_regressions
from regtopk.lab.runs import Panel, Record
from regtopk.simulate import Cluster

METHODS = ("dense", "topk", "regtopk", "regtopk-cap", "regtopk-current", "global-topk")
Curves = dict[tuple[str, float], Algorithm[Any]]  # by method and density
TRACKS_WITHIN = 3.0  # times the dense distance: what we call following dense
MOST_ENTRIES = 2**31  # of the data, in 8 bytes each
JUMP = 10.0  # a step that makes the distance so many times longer is a jump


@dataclass(frozen=True)
class Fig2Config:
    """Settings of Figure 2; memory is 1.6 MB per seed at the default sizes.

    Args:
        seeds: how many data seeds, from 0 on: 3. Or which: 3,4,5 or 7001-7005.
        num_workers: N.
        numel: J.
        num_points: D, points of one worker.
        device: where to compute: cpu or cuda.
        densities: S = k / J, each different.
        num_iterations: T.
        lr: learning rate.
        mu: RegTop-k's.
        record_every: iterations between records.
    """

    seeds: str = "1"
    num_workers: int = option(20, integer(at_least=1))
    numel: int = option(100, integer(at_least=1))
    num_points: int = option(500, integer(at_least=1))
    device: str = option("cpu", check_device)
    densities: tuple[float, ...] = option((0.4, 0.5, 0.6), check_densities)
    num_iterations: int = option(2500, integer(at_least=1))
    lr: float = option(0.01, within("(0, inf)"))
    mu: float = option(4.0, within("(0, inf)"))
    record_every: int = option(25, integer(at_least=1))

    def __post_init__(self) -> None:
        check_options(self)
        num_entries = self.num_workers * self.numel * self.num_points * len(parse_seeds(self.seeds))
        check_integer("num_workers * numel * num_points * seeds", num_entries, at_most=MOST_ENTRIES)


def regressions_of(config: Fig2Config) -> Regressions:
    """The data of every seed."""
    sizes = config.num_workers, config.numel, config.num_points
    return draw_regressions(parse_seeds(config.seeds), *sizes, config.device)


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
    with threads_for(config.numel):
        for iteration, distances, jumps in _descend(config, table):
            if iteration % config.record_every and iteration < config.num_iterations:
                continue
            dense, *_ = distances.T.tolist()
            columns = zip(table, distances.T.tolist(), jumps.T.tolist(), strict=True)
            for (method, density), own, num_jumps in columns:
                following = sum(x <= TRACKS_WITHIN * base for x, base in zip(own, dense, strict=True))
                state = {"distance": own, "jumps": num_jumps, "following": following}
                for shown_at in config.densities if method == "dense" else (density,):
                    yield {"method": method, "density": shown_at, "iteration": iteration, **state}
            progress(iteration / config.num_iterations)


@torch.inference_mode()
def _descend(config: Fig2Config, table: Curves) -> Iterator[tuple[int, Tensor, Tensor]]:
    """w := w - lr g by M methods on R seeds: yields t, the distances (R, M) and numbers of jumps (R, M)."""
    problems = regressions_of(config)
    clusters = [Cluster(algorithm, num_workers=config.num_workers) for algorithm in table.values()]
    models = torch.zeros_like(problems.optimum).unsqueeze(1).repeat(1, len(clusters), 1)  # (R, M, J)
    distances = problems.distances(models)
    num_jumps = torch.zeros_like(distances, dtype=torch.int64)
    yield 0, distances, num_jumps
    for iteration in range(1, config.num_iterations + 1):
        grads = problems.grads(models).unbind(1)
        aggregates = [cluster.step(own) for cluster, own in zip(clusters, grads, strict=True)]
        models = models - config.lr * torch.stack(aggregates, dim=1)
        before, distances = distances, problems.distances(models)
        num_jumps += distances > JUMP * before
        yield iteration, distances, num_jumps


def summarise(config: Fig2Config, records: Sequence[Record]) -> Summary:
    """Final distances, jumps, and how many seeds follow dense: within three times its distance."""
    last = {(record["method"], record["density"]): record for record in records}
    rows: list[dict[str, Any]] = []
    for density in config.densities:
        ends = {method: last[method, density] for method in METHODS}
        distance = {method: median(end["distance"]) for method, end in ends.items()}
        counts = {method: f"{end['following']}/{len(end['distance'])}" for method, end in ends.items()}
        num_jumps = {method: sum(end["jumps"]) for method, end in ends.items()}
        rows.append({"measure": f"S = {density}, distance", **distance})
        rows.append({"measure": f"S = {density}, following", **counts})
        rows.append({"measure": f"S = {density}, jumps", **num_jumps})
    fields = {"final_distance": "distance", "num_tracking_dense": "following", "num_jumps": "jumps"}
    found = {
        key: {method: {str(d): last[method, d][name] for d in config.densities} for method in METHODS}
        for key, name in fields.items()
    }
    return {**found, "table": rows}


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
        "dense to iteration 2,500; later, and earlier on some seeds, single steps throw it back: jumps, more "
        "than ten times longer. With a cap (regtopk-cap) it stays. Lines and the table give medians over the "
        "data seeds, shades the range. A seed follows dense while it is within three times its distance."
    ),
    config=Fig2Config,
    run=run,
    summarise=summarise,
    panels=panels,
)
