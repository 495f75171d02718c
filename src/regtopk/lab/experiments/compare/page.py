"""What the page of a comparison shows: its panels, and how runs are judged."""

from collections.abc import Sequence

from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.training.optimizers import OPTIMIZERS
from regtopk.lab.runs import Panel


def panels(config: CompareConfig) -> Sequence[Panel]:
    """Loss against iterations, quality against bytes, and where each method ended."""
    metric, log = config.kind.metric, config.kind.has_log_axis
    words = config.kind.metric_words or metric
    name = words.split(",")[0].capitalize()
    at_each: list[dict[str, float]] = (
        [{}] if config.is_at_equal_bytes else [{"density": d} for d in config.densities]
    )
    shown = []
    for where in at_each:
        suffix = f", density {where['density']:g}" if where and len(at_each) > 1 else ""
        shown += [
            Panel(f"Loss{suffix}", "step", "loss", "iteration", "training loss", where=where, log_y=log),
            Panel(
                f"{name} against bytes{suffix}", "payload_bytes", metric,
                "bytes a worker has contributed", words, where=where, log_x=True, log_y=log,
            ),
            Panel(
                f"{name} at the end{suffix}", "step", metric, words, "", where=where,
                log_x=log, marks="bars",
            ),
        ]  # fmt: skip
    return shown


def description_of(config: CompareConfig) -> str:
    """What the page shows, and how runs are judged."""
    task, max_norm = config.kind, OPTIMIZERS[config.optimizer].max_norm
    sentences = [
        f"{config.task}: {config.num_workers} workers with batches of {config.batch_size}, split "
        f"{config.split}, {config.optimizer}, {config.precision}.",
        "All methods start from the same models and see the same batches. Bytes are what one worker "
        f"contributes, frames included. Final numbers are means of the last evaluations, {task.num_last} of "
        "each run.",
    ]
    if task.metric_words:
        sentences.append(f"It is the {task.metric_words}: smaller is better.")
    if max_norm:
        sentences.append(
            f"Norms above {max_norm:g} are clipped: of the aggregate where gradients are exchanged, of each "
            "worker's own gradients where updates are. Bytes per step are those of a local step."
        )
    return " ".join(sentences)
