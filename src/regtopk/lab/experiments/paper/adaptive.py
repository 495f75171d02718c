"""RegTop-k with a density that moves: towards an error, from above and from below, and to a byte budget."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from regtopk.algorithms import AdaptiveDensity, RegTopK
from regtopk.core.algorithm import Algorithm
from regtopk.core.codes import full_message_bytes
from regtopk.core.options import check_integer, check_number, check_positive
from regtopk.lab.experiments.compare.config import CompareConfig, ComparedProblem
from regtopk.lab.experiments.data.splits import check_split
from regtopk.lab.experiments.experiment import Progress, Summary, WholeExperiment, by_method
from regtopk.lab.experiments.settings import check_device
from regtopk.lab.experiments.threads import threads_for
from regtopk.lab.experiments.training.trainer import Trainer
from regtopk.lab.runs import Panel, Record

INDEX_CODE = "elias-fano"
FACTOR = 10  # adapted densities start so much above and below the fixed one


@dataclass(frozen=True)
class AdaptiveConfig:
    """Settings of the comparison of adaptive densities on digits.

    Args:
        density: of the fixed run, in (0, 0.1]; adapted ones start at ten times and at a tenth of it.
        target_error: what the adapted error is to become, in (0, 1).
        every: steps from one adaptation to the next.
        num_steps, lr, split: of the training, with 8 workers and batches of 16.
        num_records: along the way.
        num_seeds: seeds 0 to num_seeds - 1.
        device: cpu or cuda.
    """

    density: float = 0.01
    target_error: float = 0.9
    every: int = 10
    num_steps: int = 600
    lr: float = 0.2
    split: str = "sorted"
    num_records: int = 60
    num_seeds: int = 3
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the settings."""
        check_number("density", self.density, "in (0, 0.1]", lambda x: 0 < x <= 1 / FACTOR)
        check_number("target_error", self.target_error, "in (0, 1)", lambda x: 0 < x < 1)
        for name in ("every", "num_steps", "num_records", "num_seeds"):
            check_integer(name, getattr(self, name), at_least=1)
        check_positive("lr", self.lr)
        check_split(self.split)
        check_device(self.device)


def methods(config: AdaptiveConfig, numel: int) -> dict[str, Algorithm[Any]]:
    """A fixed density, and three that move."""
    fixed = RegTopK(density=config.density)
    size = full_message_bytes(
        max(1, round(config.density * numel)),
        numel,
        dtype=torch.float32,
        value_code="float32",
        index_code=INDEX_CODE,
    )
    high, low = (RegTopK(density=config.density * factor) for factor in (FACTOR, 1 / FACTOR))
    every, error = config.every, config.target_error
    return {
        f"density {config.density:g}": fixed,
        f"{size} bytes a step": AdaptiveDensity(algorithm=high, bytes_per_step=size, every=every),
        f"error {error:g}, from above": AdaptiveDensity(algorithm=high, target_error=error, every=every),
        f"error {error:g}, from below": AdaptiveDensity(algorithm=low, target_error=error, every=every),
    }


def run(config: AdaptiveConfig, progress: Progress) -> Iterator[Record]:
    """Yield every method's density, error, bytes, loss and accuracy along the way, one number per seed."""
    digits = CompareConfig(
        task="digits",
        algorithms="regtopk",
        num_steps=config.num_steps,
        num_evaluations=config.num_records,
        split=config.split,
        device=config.device,
    )
    problem = ComparedProblem(digits)
    tasks = [problem.task([seed]) for seed in range(config.num_seeds)]
    stops = digits.plan.stops[1:]
    algorithms = methods(config, problem.numel)
    with threads_for(problem.numel):
        for place, (method, algorithm) in enumerate(algorithms.items()):
            trainers = [
                Trainer(task, algorithm, optimizer="sgd", lr=config.lr, index_code=INDEX_CODE)
                for task in tasks
            ]
            for stop in stops:
                measured = [measure_step(trainer, stop) for trainer in trainers]
                together = {name: [m[name] for m in measured] for name in measured[0]}
                bytes_so_far = fmean(together.pop("payload_bytes"))
                yield {"method": method, "step": stop, "payload_bytes": bytes_so_far, **together}
                progress((place + stop / config.num_steps) / len(algorithms))


def measure_step(trainer: Trainer, stop: int) -> dict[str, Any]:
    """Train one seed up to a step, and measure which share of ||a_n||^2 that last step leaves behind."""
    trainer.run_until(stop - 1)
    accumulated = trainer.task.grads(trainer.models, stop - 1, trainer.lr)[0][0]
    if stop > 1:
        accumulated = accumulated + _state(trainer)["residual"]
    trainer.run_until(stop)
    state = _state(trainer)
    error = state["residual"].square().sum(-1) / accumulated.square().sum(-1)
    fixed: Any = getattr(trainer.algorithm, "density", None)
    return {
        "density": float(state.get("density", fixed)),
        "error": float(error.mean()),
        "loss": trainer.take_losses()[0],
        "accuracy": trainer.evaluate()[0]["accuracy"],
        "payload_bytes": trainer.payload_bytes[0],
    }


def _state(trainer: Trainer) -> dict[str, Any]:
    state: dict[str, Any] = trainer.clusters[0].state_dict()["state"]
    return state


def summarise(config: AdaptiveConfig, records: Sequence[Record]) -> Summary:
    """Means over the second half of the training and over seeds, and where the training ended."""
    numbers: dict[str, dict[str, float]] = {}
    for method, own in by_method(records).items():
        late = own[len(own) // 2 :]
        numbers[method] = {
            "density, second half": _mean(record["density"] for record in late),
            "error, second half": _mean(record["error"] for record in late),
            "bytes a step": own[-1]["payload_bytes"] / own[-1]["step"],
            "final loss": _mean(record["loss"] for record in own[-3:]),
            "final accuracy": _mean(record["accuracy"] for record in own[-3:]),
        }
    measures = next(iter(numbers.values()))
    table = [
        {"measure": measure, **{method: own[measure] for method, own in numbers.items()}}
        for measure in measures
    ]
    return {"results": numbers, "table": table}


def _mean(values_by_seed: Iterable[list[float]]) -> float:
    return fmean(value for values in values_by_seed for value in values)


def panels(config: AdaptiveConfig) -> Sequence[Panel]:
    """What is moved, what it is moved for, and what comes of it."""
    return (
        Panel("The density", "step", "density", "iteration", "density", log_y=True),
        Panel("What stays behind", "step", "error", "iteration", "||a - sent||² / ||a||²"),
        Panel(
            "The training", "payload_bytes", "loss", "bytes a worker has contributed", "training loss",
            log_x=True, log_y=True,
        ),
    )  # fmt: skip


ADAPTIVE = WholeExperiment(
    name="adaptive",
    title="A density that adapts itself",
    about=(
        "RegTop-k on digits with a fixed density, and with one that moves, towards a byte budget or an "
        "error: the share of what a worker has accumulated that stays behind. Lines are medians over seeds, "
        "shades the range."
    ),
    config=AdaptiveConfig,
    run=run,
    summarise=summarise,
    panels=panels,
)
