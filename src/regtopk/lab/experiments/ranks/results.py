"""What came out of `regtopk train`: the table and the figure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from regtopk.distributed.requests.record import PHASES
from regtopk.lab.experiments.experiment import Summary
from regtopk.lab.experiments.ranks.config import TrainConfig
from regtopk.lab.runs import Panel, Record

TARGET = 95.0  # percent of the test digits: what "sent until" counts up to


class Quality(NamedTuple):
    """What says how good a model is: its name in records and in the summary, and in words."""

    metric: str
    in_summary: str
    words: str
    title: str
    log_y: bool = False


QUALITIES = {
    "digits": Quality("accuracy", "test_accuracy", "test digits read right, %", "Accuracy"),
    "gpt": Quality("test_loss", "test_loss", "test loss, nats per character", "Test loss", log_y=True),
}


def summarise(config: TrainConfig, records: Sequence[Record]) -> Summary:
    """Where each method ended, what it sent, and where its time went."""
    quality, own = QUALITIES[config.task], config.method.label
    final = {record["method"]: record for record in records}
    sent = {method: record["sent_bytes"] for method, record in final.items()}
    measures: dict[str, dict[str, float | None]] = {
        quality.in_summary: {method: median(record[quality.metric]) for method, record in final.items()},
        "training_loss": {method: median(record["loss"]) for method, record in final.items()},
        "sent_bytes": sent,
        "sent_bytes_a_step": {method: total / config.num_steps for method, total in sent.items()},
        "times_less_than_dense": {own: sent["dense"] / sent[own]},
        "step_s": {method: _median_of_steps("step_s", method, records) for method in final},
        **{phase: {own: _median_of_steps(phase, own, records)} for phase in PHASES},
    }
    rows = [
        (quality.words, quality.in_summary, 1.0),
        ("training loss", "training_loss", 1.0),
        ("sent a step, kB", "sent_bytes_a_step", 1e-3),
        ("sent in all, MB", "sent_bytes", 1e-6),
        ("times less sent", "times_less_than_dense", 1.0),
        ("step, ms", "step_s", 1e3),
        *((f"of which {phase[:-2]}", phase, 1e3) for phase in PHASES),
    ]
    target = {}
    if config.task == "digits":
        measures["sent_bytes_until_target"] = {
            method: _sent_until_target(method, records) for method in final
        }
        rows.insert(5, (f"sent until {TARGET:.0f} %, MB", "sent_bytes_until_target", 1e-6))
        target = {"target_accuracy": TARGET}
    what = {"task": config.task, "exchange": config.method.rounds.exchange}
    return {**what, **measures, **target, "table": _table(rows, measures)}


def _median_of_steps(name: str, method: str, records: Sequence[Record]) -> float:
    return float(median(r[name] for r in records if r["method"] == method and r["step"] > 0))


def _sent_until_target(method: str, records: Sequence[Record]) -> float | None:
    reached = (r for r in records if r["method"] == method and median(r["accuracy"]) >= TARGET)
    return next((record["sent_bytes"] for record in reached), None)


def _table(
    rows: Sequence[tuple[str, str, float]], measures: Mapping[str, Mapping[str, float | None]]
) -> list[dict[str, Any]]:
    return [
        {"measure": label, **{method: x and unit * x for method, x in measures[name].items()}}
        for label, name, unit in rows
    ]


def panels(config: TrainConfig) -> Sequence[Panel]:
    """Quality and training loss, against steps and against bytes sent."""
    shown = QUALITIES[config.task]
    quality = Panel(f"{shown.title}, by steps", "step", shown.metric, "step", shown.words, log_y=shown.log_y)
    loss = replace(quality, title="Loss, by steps", y="loss", y_label="training loss", log_y=True)
    bytes_sent: dict[str, Any] = {"x": "sent_bytes", "x_label": "bytes sent by a worker", "log_x": True}
    return (
        quality,
        replace(quality, title=f"{shown.title}, by bytes", **bytes_sent),
        loss,
        replace(loss, title="Loss, by bytes", **bytes_sent),
    )
