"""Figure 2: linear regression on workers that disagree, at densities 0.4, 0.5 and 0.6.

    X_n iid N(0, 1), (D, J);  t_n iid N(u_n, h^2), u_n ~ N(U, sigma^2);  y_n = X_n t_n + N(0, noise)
    F_n(w) = ||X_n w - y_n||^2 / (2 D),   w_n = 1/N,   full batches, w^0 = 0

What is recorded is the distance ||w^t - w*|| to the minimiser of the mean of the F_n, and how often a single
step made it more than ten times longer: a jump. All data seeds and half of the methods are one batch: the
gradients X_n^T (X_n w - y_n) / D = A_n w - b_n of all their models are one product. The other half runs at
the same time in a second process.
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
from regtopk.core.options import check_choice, check_integer, check_positive
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.experiment import Progress, Summary, WholeExperiment
from regtopk.lab.experiments.paper.side_by_side import side_by_side
from regtopk.lab.experiments.settings import check_device, parse_seeds
from regtopk.lab.experiments.threads import threads_for
from regtopk.lab.runs import Panel, Record
from regtopk.simulate import Cluster

METHODS = ("dense", "topk", "regtopk", "regtopk-cap", "regtopk-current", "global-topk")
Curves = dict[tuple[str, float], Algorithm[Any]]  # by method and density
TRACKS_WITHIN = 3.0  # times the dense distance: what we call following dense
JUMP = 10.0  # a step that makes the distance so many times longer is a jump
LOSSES = {"half": 1.0, "mse": 2.0}  # what the gradient of ||X w - y||^2 / (2 D) is multiplied by
# The authors' script undoes a step whose squared length is 100 times that of the last one it kept.
GUARD_FACTOR, GUARD_START = 100.0, 1e5


@dataclass(frozen=True)
class Fig2Config:
    """Settings of Figure 2; memory is 1.6 MB per seed at the default sizes.

    Args:
        num_seeds: data seeds 0 to num_seeds - 1.
        seeds: which ones instead, such as 7001-7005.
        methods: some of dense, topk, regtopk, regtopk-cap, regtopk-current, global-topk; dense must be there.
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
        loss: half, the paper's ||X w - y||^2 / (2 D), or mse, twice that, as in the authors' script.
        start: zero, or linear, torch.nn.Linear's random first weights, as in the authors' script.
        dtype: float64, or float32, as in the authors' script.
        guard: undo a step of RegTop-k that is ten times as long as the last one kept, as in the authors'
            script; residuals and scores go on as if it had been kept.
        record_every: iterations between records.
        device: cpu or cuda.
    """

    num_seeds: int = 1
    seeds: str = ""
    methods: str = ",".join(METHODS)
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
    loss: str = "half"
    start: str = "zero"
    dtype: str = "float64"
    guard: bool = False
    record_every: int = 25
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the settings."""
        for name in ("num_seeds", "num_iterations", "num_workers", "numel", "num_points", "record_every"):
            check_integer(name, getattr(self, name), at_least=1)
        if self.seeds and self.num_seeds != 1:
            raise ArgumentError(f"give num_seeds or seeds, got {self.num_seeds} and {self.seeds!r}")
        parse_seeds(self.which)
        methods = self.methods.split(",")
        for method in methods:
            check_choice("methods", method, METHODS)
        if "dense" not in methods or len(set(methods)) < len(methods):
            raise ArgumentError(f"methods must be different, and dense among them, got {self.methods!r}")
        for name in ("lr", "mu", "mean_variance", "model_variance", "noise_variance"):
            check_positive(name, getattr(self, name))
        for density in self.densities:
            check_density(density)
        if not self.densities or len(set(self.densities)) < len(self.densities):
            raise ArgumentError(f"densities must be different and at least one, got {self.densities}")
        if not -torch.inf < self.mean < torch.inf:
            raise ArgumentError(f"mean must be finite, got {self.mean}")
        check_choice("loss", self.loss, tuple(LOSSES))
        check_choice("start", self.start, ("zero", "linear"))
        check_choice("dtype", self.dtype, ("float64", "float32"))
        check_device(self.device)

    @property
    def which(self) -> str:
        """The seeds, as `parse_seeds` reads them."""
        return self.seeds or str(self.num_seeds)

    @property
    def chosen(self) -> list[str]:
        """The methods, in the order of tables."""
        return [method for method in METHODS if method in self.methods.split(",")]


@dataclass(frozen=True)
class Problems:
    """The regressions of R seeds: A_n = X_n^T X_n / D, b_n = X_n^T y_n / D, and the minimiser w*."""

    gram: Tensor  # (R, J, N J): the A_n side by side
    moment: Tensor  # (R, N, J): the b_n
    optimum: Tensor  # (R, J), float64
    start: Tensor  # (R, J): w^0

    def grads(self, models: Tensor) -> Tensor:
        """A_n w - b_n for M models of each seed: (R, M, J) in, (R, M, N, J) out."""
        grads = (models @ self.gram).view(*models.shape[:2], *self.moment.shape[1:])
        return grads.sub_(self.moment.unsqueeze(1))


def make_problems(config: Fig2Config) -> Problems:
    """Draw the data of every seed, on the CPU in float64, so that a seed means the same everywhere."""
    drawn = zip(*(_draw(config, seed) for seed in parse_seeds(config.which)), strict=True)
    gram, moment, start = (torch.stack(parts).to(config.device) for parts in drawn)
    optimum = torch.linalg.solve(gram.mean(1), moment.mean(1))
    dtype, scale = getattr(torch, config.dtype), LOSSES[config.loss]
    gram = gram.transpose(1, 2).flatten(2)  # A_n is symmetric
    start = start if config.start == "linear" else torch.zeros_like(start)
    return Problems((scale * gram).to(dtype), (scale * moment).to(dtype), optimum, start.to(dtype))


def _draw(config: Fig2Config, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A_n, b_n and a random start, which is drawn last, so that it does not change the data."""
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
    start = torch.rand(config.numel, generator=generator, dtype=torch.float64)
    return gram, moment, (2 * start - 1) / math.sqrt(config.numel)


def algorithms(config: Fig2Config) -> Curves:
    """What runs, by method and density; dense, which has none, runs once, under density 1."""
    table: Curves = {("dense", 1.0): Dense()}
    for density in config.densities:
        table["topk", density] = TopK(density=density)
        table["regtopk", density] = RegTopK(density=density, mu=config.mu)
        table["regtopk-cap", density] = RegTopK(density=density, mu=config.mu, damping="cap")
        table["regtopk-current", density] = RegTopK(density=density, mu=config.mu, reference="current")
        table["global-topk", density] = GlobalTopK(density=density)
    return {curve: algorithm for curve, algorithm in table.items() if curve[0] in config.chosen}


def run(config: Fig2Config, progress: Progress) -> Iterator[Record]:
    """Yield, every so often, each method's distances and jumps, one for each seed, and who follows dense."""
    table = algorithms(config)
    halves = [half for n in range(2) if (half := dict(list(table.items())[n::2]))]
    with threads_for(config.numel):
        problems = make_problems(config)
        steps = side_by_side([partial(_descend, config, problems, half) for half in halves])
        for iteration, found in zip(_recorded(config), steps, strict=True):
            states = {curve: state for half in found for curve, state in half.items()}
            for method, density in table:
                state = states[method, density]
                following = _num_tracking(state["distance"], states["dense", 1.0]["distance"])
                for shown_at in config.densities if method == "dense" else (density,):
                    record = {"method": method, "density": shown_at, "iteration": iteration}
                    yield record | state | {"following": following}
            progress(iteration / config.num_iterations)


def _recorded(config: Fig2Config) -> list[int]:
    return sorted({*range(0, config.num_iterations, config.record_every), config.num_iterations})


def _descend(config: Fig2Config, problems: Problems, table: Curves) -> Iterator[dict[tuple[str, float], Any]]:
    """Each curve's distances and jumps so far, one for each seed, at the recorded iterations."""
    descent = Descent(config, problems, table)
    for iteration in _recorded(config):
        while descent.num_steps < iteration:
            descent.step()
        columns = zip(descent.distances.T.tolist(), descent.num_jumps.T.tolist(), strict=True)
        states = [{"distance": distance, "jumps": jumps} for distance, jumps in columns]
        yield dict(zip(table, states, strict=True))


class Descent:
    """Gradient descent of M methods on the problems of R seeds: w := w - lr g."""

    def __init__(self, config: Fig2Config, problems: Problems, table: Curves) -> None:
        self.lr, self.problems = config.lr, problems
        self.clusters = [Cluster(algorithm, num_workers=config.num_workers) for algorithm in table.values()]
        self.models = problems.start.unsqueeze(1).repeat(1, len(table), 1)  # (R, M, J)
        is_guarded = [config.guard and isinstance(algorithm, RegTopK) for algorithm in table.values()]
        self.is_guarded = torch.tensor(is_guarded, device=config.device)
        self.too_long = self.models.new_full(self.models.shape[:2], GUARD_START)  # in squared length
        self.distances = self._distances()  # (R, M)
        self.num_jumps = torch.zeros_like(self.distances, dtype=torch.int64)
        self.num_steps = 0

    @torch.inference_mode()
    def step(self) -> None:
        """One iteration of every method on every seed."""
        grads = self.problems.grads(self.models).unbind(1)
        aggregates = [cluster.step(own) for cluster, own in zip(self.clusters, grads, strict=True)]
        models = self.models - self.lr * torch.stack(aggregates, dim=1)
        squared = (self.models - models).square().sum(-1)  # of the step as it was rounded
        is_undone = self.is_guarded & (squared >= self.too_long)
        self.too_long = torch.where(is_undone, self.too_long, GUARD_FACTOR * squared)
        self.models = torch.where(is_undone.unsqueeze(-1), self.models, models)
        before, self.distances = self.distances, self._distances()
        self.num_jumps += self.distances > JUMP * before
        self.num_steps += 1

    def _distances(self) -> Tensor:
        off = self.models - self.problems.optimum.unsqueeze(1)
        distances: Tensor = torch.linalg.vector_norm(off, dim=-1)
        return distances


def summarise(config: Fig2Config, records: Sequence[Record]) -> Summary:
    """Final distances, jumps, and how many seeds follow dense: within three times its distance."""
    methods, num_seeds = config.chosen, len(parse_seeds(config.which))
    final: dict[str, dict[str, list[float]]] = {method: {} for method in methods}
    jumps: dict[str, dict[str, list[int]]] = {method: {} for method in methods}
    for record in records:
        final[record["method"]][str(record["density"])] = record["distance"]
        jumps[record["method"]][str(record["density"])] = record["jumps"]
    num_tracking = {
        method: {key: _num_tracking(distances, final["dense"][key]) for key, distances in by_density.items()}
        for method, by_density in final.items()
    }
    rows: list[dict[str, Any]] = []
    for key in map(str, config.densities):
        distance = {method: median(final[method][key]) for method in methods}
        counts = {method: f"{num_tracking[method][key]}/{num_seeds}" for method in methods}
        num_jumps = {method: sum(jumps[method][key]) for method in methods}
        rows.append({"measure": f"S = {key}, distance", **distance})
        rows.append({"measure": f"S = {key}, following", **counts})
        rows.append({"measure": f"S = {key}, jumps", **num_jumps})
    return {"final_distance": final, "num_tracking_dense": num_tracking, "num_jumps": jumps, "table": rows}


def _num_tracking(distances: list[float], dense: list[float]) -> int:
    return sum(mine <= TRACKS_WITHIN * base for mine, base in zip(distances, dense, strict=True))


def panels(config: Fig2Config) -> Sequence[Panel]:
    """Two for each density: distance against iterations, and how many seeds follow dense."""
    shown = []
    for d in config.densities:
        where, y_label = {"density": d}, "distance to the optimum"
        shown.append(
            Panel(f"S = {d}", "iteration", "distance", "iteration", y_label, where=where, log_y=True)
        )
        y_label = f"seeds that follow dense, of {len(parse_seeds(config.which))}"
        shown.append(Panel(f"S = {d}", "iteration", "following", "iteration", y_label, where=where, y_min=0))
    return shown


FIG2 = WholeExperiment(
    name="fig2",
    title="Figure 2: linear regression, distance to the optimum",
    about=(
        "Workers whose data disagree. Top-k circles the optimum at a distance. At S = 0.6 RegTop-k follows "
        "training without sparsification to iteration 2,500 in float64. Single steps throw it back later, "
        "and earlier on some seeds and in float32: jumps, which make the distance more than ten times "
        "longer. With a cap (regtopk-cap) it stays. Lines and the table give medians over the data seeds, "
        "shades the range. A seed follows dense while it is within three times its distance."
    ),
    config=Fig2Config,
    run=run,
    summarise=summarise,
    panels=panels,
)
