"""Figure 2: linear regression on workers that disagree, at densities 0.4, 0.5 and 0.6.

    X_n iid N(0, 1), (D, J);  t_n iid N(u_n, h^2), u_n ~ N(U, sigma^2);  y_n = X_n t_n + N(0, noise)
    F_n(w) = ||X_n w - y_n||^2 / (2 D),   w_n = 1/N,   full batches, w^0 = 0

What is recorded is the distance ||w^t - w*|| to the minimiser of the mean of the F_n. All data seeds and
half of the methods are one batch: the gradients X_n^T (X_n w - y_n) / D = A_n w - b_n of all their models are
one product. The other half runs at the same time in a second process.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from regtopk.algorithms import Dense, GlobalTopK, RegTopK, TopK
from regtopk.core.algorithm import Algorithm, check_density
from regtopk.core.options import check_integer, check_positive
from regtopk.errors import ArgumentError
from regtopk.experiments.experiment import Progress, Summary, WholeExperiment
from regtopk.experiments.settings import check_device
from regtopk.experiments.side_by_side import side_by_side
from regtopk.experiments.threads import threads_for
from regtopk.runs import Panel, Record
from regtopk.simulate import Cluster

METHODS = ("dense", "topk", "regtopk", "regtopk-current", "global-topk")
Curves = dict[tuple[str, float], Algorithm[Any]]  # by method and density
TRACKS_WITHIN = 3.0  # times the dense distance: what we call following dense


@dataclass(frozen=True)
class Fig2Config:
    """Settings of Figure 2; memory is 1.6 MB per seed at the default sizes.

    Args:
        num_seeds: data seeds 0 to num_seeds - 1.
        densities: S = k / J, each in (0, 1] and different.
        num_iterations: T.
        lr: learning rate, > 0.
        mu: RegTop-k's, > 0.
        num_workers: N.
        numel: J.
        num_points: D, points of one worker.
        mean: U.
        mean_variance: sigma^2, > 0.
        model_variance: h^2, > 0.
        noise_variance: of the labels, > 0.
        record_every: iterations between records.
        device: cpu or cuda.
    """

    num_seeds: int = 1
    densities: tuple[float, ...] = (0.4, 0.5, 0.6)
    num_iterations: int = 2500
    lr: float = 0.01
    mu: float = 4.0
    num_workers: int = 20
    numel: int = 100
    num_points: int = 500
    mean: float = 0.0
    mean_variance: float = 5.0
    model_variance: float = 1.0
    noise_variance: float = 0.5
    record_every: int = 25
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("num_seeds", "num_iterations", "num_workers", "numel", "num_points", "record_every"):
            check_integer(name, getattr(self, name), at_least=1)
        for name in ("lr", "mu", "mean_variance", "model_variance", "noise_variance"):
            check_positive(name, getattr(self, name))
        for density in self.densities:
            check_density(density)
        if not self.densities or len(set(self.densities)) < len(self.densities):
            raise ArgumentError(f"densities must be different and at least one, got {self.densities}")
        if not -torch.inf < self.mean < torch.inf:
            raise ArgumentError(f"mean must be finite, got {self.mean}")
        check_device(self.device)


@dataclass(frozen=True)
class Problems:
    """The regressions of R seeds: A_n = X_n^T X_n / D, b_n = X_n^T y_n / D, and the minimiser w*."""

    gram: Tensor  # (R, J, N J): the A_n side by side
    moment: Tensor  # (R, N, J): the b_n
    optimum: Tensor  # (R, J)

    def grads(self, models: Tensor) -> Tensor:
        """A_n w - b_n for M models of each seed: (R, M, J) in, (R, M, N, J) out."""
        grads = (models @ self.gram).view(*models.shape[:2], *self.moment.shape[1:])
        return grads.sub_(self.moment.unsqueeze(1))


def make_problems(config: Fig2Config) -> Problems:
    """Draw the data of every seed, on the CPU in float64, so that a seed means the same everywhere."""
    drawn = [_draw(config, seed) for seed in range(config.num_seeds)]
    gram = torch.stack([gram for gram, _ in drawn]).to(config.device)
    moment = torch.stack([moment for _, moment in drawn]).to(config.device)
    optimum = torch.linalg.solve(gram.mean(1), moment.mean(1))
    return Problems(gram.transpose(1, 2).flatten(2), moment, optimum)  # A_n is symmetric


def _draw(config: Fig2Config, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, variance: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * math.sqrt(variance)

    shape = config.num_workers, config.num_points, config.numel
    points = normal(*shape)
    means = config.mean + normal(config.num_workers, 1, variance=config.mean_variance)
    truths = means + normal(config.num_workers, config.numel, variance=config.model_variance)
    labels = torch.einsum("ndj,nj->nd", points, truths)
    labels = labels + normal(*labels.shape, variance=config.noise_variance)
    gram = torch.einsum("ndi,ndj->nij", points, points) / config.num_points
    moment = torch.einsum("ndj,nd->nj", points, labels) / config.num_points
    return gram, moment


def algorithms(config: Fig2Config) -> Curves:
    """What runs, by method and density; dense, which has none, runs once, under density 1."""
    table: Curves = {("dense", 1.0): Dense()}
    for density in config.densities:
        table["topk", density] = TopK(density=density)
        table["regtopk", density] = RegTopK(density=density, mu=config.mu)
        table["regtopk-current", density] = RegTopK(density=density, mu=config.mu, reference="current")
        table["global-topk", density] = GlobalTopK(density=density)
    return table


def run(config: Fig2Config, progress: Progress) -> Iterator[Record]:
    """Yield, every so often, each method's distances from the optimum, one for each seed."""
    table = algorithms(config)
    halves = [dict(list(table.items())[n::2]) for n in range(2)]
    with threads_for(config.numel):
        problems = make_problems(config)
        steps = side_by_side([partial(_descend, config, problems, half) for half in halves])
        for iteration, found in zip(_recorded(config), steps, strict=True):
            distances = {curve: distance for half in found for curve, distance in half.items()}
            for method, density in table:
                for shown_at in config.densities if method == "dense" else (density,):
                    record = {"method": method, "density": shown_at, "iteration": iteration}
                    yield {**record, "distance": distances[method, density]}
            progress(iteration / config.num_iterations)


def _recorded(config: Fig2Config) -> list[int]:
    return sorted({*range(0, config.num_iterations, config.record_every), config.num_iterations})


def _descend(config: Fig2Config, problems: Problems, table: Curves) -> Iterator[dict[tuple[str, float], Any]]:
    """Each curve's distances from the optimum, one for each seed, at the recorded iterations."""
    clusters = [Cluster(algorithm, num_workers=config.num_workers) for algorithm in table.values()]
    models = problems.optimum.new_zeros(config.num_seeds, len(table), config.numel)
    now = 0
    for iteration in _recorded(config):
        for _ in range(now, iteration):
            _step_(models, problems, clusters, config.lr)
        now = iteration
        distances = (models - problems.optimum.unsqueeze(1)).norm(dim=-1).T.tolist()
        yield dict(zip(table, distances, strict=True))


@torch.inference_mode()
def _step_(models: Tensor, problems: Problems, clusters: Sequence[Cluster], lr: float) -> None:
    """One iteration of every method on every seed: w := w - lr g."""
    grads = problems.grads(models).unbind(1)
    aggregates = [cluster.step(own) for cluster, own in zip(clusters, grads, strict=True)]
    models -= lr * torch.stack(aggregates, dim=1)


def summarise(config: Fig2Config, records: Sequence[Record]) -> Summary:
    """Final distances, and how many seeds follow dense: within three times its distance."""
    final: dict[str, dict[str, list[float]]] = {method: {} for method in METHODS}
    for record in records:
        final[record["method"]][str(record["density"])] = record["distance"]
    num_tracking = {
        method: {key: _num_tracking(distances, final["dense"][key]) for key, distances in by_density.items()}
        for method, by_density in final.items()
    }
    rows: list[dict[str, Any]] = []
    for key in map(str, config.densities):
        distance = {method: median(final[method][key]) for method in METHODS}
        counts = {method: f"{num_tracking[method][key]}/{config.num_seeds}" for method in METHODS}
        rows.append({"measure": f"S = {key}, distance", **distance})
        rows.append({"measure": f"S = {key}, following", **counts})
    return {"final_distance": final, "num_tracking_dense": num_tracking, "table": rows}


def _num_tracking(distances: list[float], dense: list[float]) -> int:
    return sum(mine <= TRACKS_WITHIN * base for mine, base in zip(distances, dense, strict=True))


def panels(config: Fig2Config) -> Sequence[Panel]:
    """One for each density: distance against iterations."""
    y_label = "distance to the optimum"
    return [
        Panel(f"S = {d}", "iteration", "distance", "iteration", y_label, where={"density": d}, log_y=True)
        for d in config.densities
    ]


FIG2 = WholeExperiment(
    name="fig2",
    title="Figure 2: linear regression, distance to the optimum",
    about=(
        "Workers whose data disagree. Top-k circles the optimum at a distance; from S = 0.6 on "
        "RegTop-k follows training without sparsification. Lines and the table give medians over the data "
        "seeds, shades the range; a seed follows dense if it ends within three times its distance."
    ),
    config=Fig2Config,
    run=run,
    summarise=summarise,
    panels=panels,
)
