"""Many methods on one task, at equal density or at equal bytes, over several seeds."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from regtopk.core.words import counted
from regtopk.experiments.budget import Probe
from regtopk.experiments.compare_config import CompareConfig, parse_like
from regtopk.experiments.experiment import Experiment, Progress, Summary
from regtopk.experiments.fleet import Fleet
from regtopk.experiments.methods import make_method, parse_method, takes_density, with_budget
from regtopk.experiments.statistics import paired_difference, spread
from regtopk.experiments.tasks import TASKS, Task
from regtopk.experiments.threads import threads_for
from regtopk.runs import Panel, Record

LAST_EVALUATIONS = 3  # what "final" averages over, where a number is noisy


def run(config: CompareConfig, progress: Progress) -> Iterator[Record]:
    """Yield every method's loss, quality and bytes along the way, one number for each seed."""
    make_task = TASKS[config.task]
    task = make_task(config.task_config(), range(config.num_seeds))
    tuning = make_task(config.task_config(), [config.num_seeds]) if len(config.lr) > 1 else None
    with threads_for(task.layout.numel):
        yield from _run(config, task, tuning, progress)


def _run(config: CompareConfig, task: Task, tuning: Task | None, progress: Progress) -> Iterator[Record]:
    plan = _plan(config, task)
    for place, (method, density) in enumerate(plan):
        lr = _best_lr(config, tuning, method, density) if tuning else config.lr[0]
        done = place / len(plan)
        for record in _train(config, task, method, density, lr):
            yield record
            progress(done + record["step"] / task.config.num_steps / len(plan))


def _plan(config: CompareConfig, task: Task) -> list[tuple[str, float | None]]:
    """Which methods run at which densities; a method without an open density runs once."""
    if not config.is_at_equal_bytes:
        return [
            (method, density)
            for method in config.methods
            for density in (config.densities if takes_density(method) else (None,))
        ]
    probe, budget = Probe.of_task(task), config.bytes_per_step
    if config.like:
        name, density, index_code, value_code = parse_like(config.like)
        reference = make_method(name, density=density, value_code=value_code)
        budget = probe.payload(reference, index_code)
    methods = [with_budget(method, budget) for method in config.methods]
    return [(method, _density_for(config, method, probe, budget)) for method in methods]


def _density_for(config: CompareConfig, method: str, probe: Probe, budget: float) -> float | None:
    if not takes_density(method):
        return None
    return probe.find_density(
        lambda density: make_method(method, density=density, value_code=config.value_code),
        config.index_code,
        budget,
        name=method,
    )


def _best_lr(config: CompareConfig, tuning: Task, method: str, density: float | None) -> float:
    """The best of the grid on a seed that is not counted; the same number of runs for every method."""
    quality = {}
    for lr in config.lr:
        records = list(_train(config, tuning, method, density, lr))
        final = _final(records, tuning)[0]
        quality[lr] = -math.inf if records[-1]["diverged"] else final if tuning.is_better_higher else -final
    return max(quality, key=lambda lr: quality[lr])


def _train(
    config: CompareConfig, task: Task, method: str, density: float | None, lr: float
) -> Iterator[Record]:
    algorithm = make_method(method, density=density, value_code=config.value_code)
    fleet = Fleet(task, algorithm, optimizer=config.optimizer, lr=lr, index_code=config.index_code)
    num_steps = task.config.num_steps
    stops = sorted({round(num_steps * i / config.num_evaluations) for i in range(config.num_evaluations + 1)})
    for stop in stops:
        fleet.run_until(stop)
        yield {
            "method": method,
            "density": density,
            "value_code": getattr(algorithm, "value_code", None),
            "lr": lr,
            "step": stop,
            "loss": fleet.losses,
            task.metric: fleet.evaluate(),
            "payload_bytes": fleet.payload_bytes,
            "diverged": fleet.diverged,
        }


def is_topk(method: str) -> bool:
    """Whether a method is plain Top-k, whatever its code: what the others are measured against."""
    return parse_method(method)[0] == "topk"


def _final(records: Sequence[Record], task: type[Task] | Task) -> list[float]:
    last = records[-LAST_EVALUATIONS:] if task.is_better_higher else records[-1:]
    return [fmean(values) for values in zip(*(record[task.metric] for record in last), strict=True)]


def summarise(config: CompareConfig, records: Sequence[Record]) -> Summary:
    """Where each method ended, its spread, its bytes, and the paired difference from Top-k."""
    task = TASKS[config.task]
    runs: dict[tuple[str, float | None], list[Record]] = {}
    for record in records:
        runs.setdefault((record["method"], record["density"]), []).append(record)
    finals = {key: _final(run_records, task) for key, run_records in runs.items()}
    results = []
    for (method, density), run_records in runs.items():
        last = run_records[-1]
        final = finals[method, density]
        mean, std = spread(final)
        base = _base(config, finals, density)
        results.append(
            {
                "method": method,
                "density": density,
                "value_code": last["value_code"],
                "optimizer": config.optimizer,
                "lr": last["lr"],
                "payload_bytes_per_step": last["payload_bytes"] / last["step"],
                "final": final,
                "mean": mean,
                "std": std,
                "difference_from_topk": None if base is None else paired_difference(final, base),
                "diverged": last["diverged"],
            }
        )
    return {"task": config.task, "metric": task.metric, "results": results, "table": _table(results, task)}


def _base(
    config: CompareConfig, finals: dict[tuple[str, float | None], list[float]], density: float | None
) -> list[float] | None:
    """What differences are taken from: the first Top-k, at the same density where densities are compared."""
    bases = {d: final for (method, d), final in reversed(finals.items()) if is_topk(method)}
    if density is not None and not config.is_at_equal_bytes:
        return bases.get(density)
    return next(reversed(bases.values()), None)


def _table(results: Sequence[dict[str, Any]], task: type[Task]) -> list[dict[str, Any]]:
    rows = []
    sign = -1 if task.is_better_higher else 1
    ranked = sorted(results, key=lambda r: (bool(r["diverged"]), sign * r["mean"]))  # diverged ones last
    for result in ranked:
        difference = result["difference_from_topk"]
        interval = None
        if difference is not None and difference["low"] is not None:
            interval = f"{difference['low']:+.3g} … {difference['high']:+.3g}"
        rows.append(
            {
                "measure": result["method"],
                "density": result["density"],
                "bytes a step": round(result["payload_bytes_per_step"]),
                "lr": result["lr"],
                task.metric: result["mean"],
                "± std": result["std"],
                "from Top-k": None if difference is None else difference["mean"],
                "95 % interval": interval,
                "diverged": counted(len(result["diverged"]), "seed") if result["diverged"] else None,
            }
        )
    return rows


def panels(config: CompareConfig) -> Sequence[Panel]:
    """Loss against iterations, quality against bytes, and where each method ended."""
    task = TASKS[config.task]
    is_distance = not task.is_better_higher
    at_each: list[dict[str, float]] = (
        [{}] if config.is_at_equal_bytes else [{"density": d} for d in config.densities]
    )
    shown = []
    for where in at_each:
        suffix = f", density {where['density']:g}" if where and len(at_each) > 1 else ""
        shown.append(
            Panel(
                f"Loss{suffix}", "step", "loss", "iteration", "training loss", where=where, log_y=is_distance
            )
        )
        shown.append(
            Panel(
                f"{task.metric.capitalize()} against bytes{suffix}",
                "payload_bytes",
                task.metric,
                "bytes a worker has contributed",
                task.metric,
                where=where,
                log_x=True,
                log_y=is_distance,
            )
        )
        title = f"{task.metric.capitalize()} at the end{suffix}"
        shown.append(
            Panel(title, "step", task.metric, task.metric, "", where=where, log_x=is_distance, marks="bars")
        )
    return shown


COMPARE = Experiment(
    name="compare",
    title="Methods compared",
    about=(
        "All methods start from the same models and see the same batches. Lines are medians over seeds, "
        "shades the range. Bytes are what one worker contributes, frames included. "
        "The table averages the last three evaluations; the last panel shows the very last."
    ),
    config=CompareConfig,
    run=run,
    summarise=summarise,
    panels=panels,
)
