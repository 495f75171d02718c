"""What came out of `regtopk train`: the table and the figure."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from regtopk.distributed.requests.record import PHASES
from regtopk.lab.experiments.experiment import Summary, by_method
from regtopk.lab.experiments.ranks.config import TrainConfig
from regtopk.lab.runs import Panel, Record

DIGITS_READ = "test digits read right, %"
ON_ONE_MACHINE = "On one machine bytes cost nothing: regtopk plan says what they cost on your link."


def summarise(config: TrainConfig, records: Sequence[Record]) -> Summary:
    """Where each method ended, what it sent, and where its time went."""
    name, words = f"test_{config.kind.metric.removeprefix('test_')}", config.metric_words or DIGITS_READ
    curves = by_method(records)
    final = {method: own[-1] for method, own in curves.items()}
    sent = {method: record["sent_bytes"] for method, record in final.items()}
    received = {method: record["received_bytes"] for method, record in final.items()}

    def median_of(measure: str) -> dict[str, float]:
        timed = {m: [r[measure] for r in own if r["step"] > 0 and measure in r] for m, own in curves.items()}
        return {method: float(median(times)) for method, times in timed.items() if times}

    measures: dict[str, dict[str, float]] = {
        name: {method: median(record[config.kind.metric]) for method, record in final.items()},
        "training_loss": {method: median(record["loss"]) for method, record in final.items()},
        "sent_bytes": sent,
        "sent_bytes_a_step": {method: total / config.num_steps for method, total in sent.items()},
        "received_bytes_per_step": {method: total / config.num_steps for method, total in received.items()},
        "times_less_than_dense": {m: sent["dense"] / own for m, own in sent.items() if m != "dense"},
        "step_s": median_of("step_s"),
        **{phase: median_of(phase) for phase in PHASES},
    }
    rows = [
        (words, name, 1.0),
        ("training loss", "training_loss", 1.0),
        ("sent per step, kB", "sent_bytes_a_step", 1e-3),
        ("received per step, kB", "received_bytes_per_step", 1e-3),
        ("sent in all, MB", "sent_bytes", 1e-6),
        ("times less sent", "times_less_than_dense", 1.0),
        ("step, ms", "step_s", 1e3),
        *((f"of which {phase[:-2]}", phase, 1e3) for phase in PHASES),
    ]
    table = [
        {"measure": label, **{method: unit * x for method, x in measures[of].items()}}
        for label, of, unit in rows
    ]
    said = {"notes": [ON_ONE_MACHINE], "finding": finding(config, measures[name], received)}
    return {"task": config.task, **measures, "table": table, **said}


def finding(config: TrainConfig, quality: dict[str, float], received: dict[str, float]) -> str:
    """What was trained and what it cost, in a sentence: by the first method, and by dense."""
    method = next(name for name in quality if name != "dense")
    reads = (
        "{:.1f} % of the test digits are read right" if config.task == "digits" else "the test loss is {:.3f}"
    )
    own, dense = (reads.format(quality[each]) for each in (method, "dense"))
    less = received["dense"] / max(1, received[method])
    return (
        f"{config.num_workers} processes trained on {config.task} for {config.num_steps} steps. With "
        f"{method} {own}, and each process received {received[method] / 1e6:.2f} MB. With dense DDP {dense}, "
        f"and each received {received['dense'] / 1e6:.2f} MB, {less:.0f} times as much."
    )


def panels(config: TrainConfig) -> Sequence[Panel]:
    """Quality and training loss, against steps and against bytes sent."""
    metric, words = config.kind.metric, config.metric_words or DIGITS_READ
    title, is_log = metric.replace("_", " ").capitalize(), not config.kind.is_better_higher
    quality = Panel(f"{title}, by steps", "step", metric, "step", words, log_y=is_log)
    loss = replace(quality, title="Loss, by steps", y="loss", y_label="training loss", log_y=True)
    bytes_sent: dict[str, Any] = {"x": "sent_bytes", "x_label": "bytes sent by a worker", "log_x": True}
    quality_by_bytes = replace(quality, title=f"{title}, by bytes", **bytes_sent)
    return quality, quality_by_bytes, loss, replace(loss, title="Loss, by bytes", **bytes_sent)
