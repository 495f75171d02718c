"""A plan for people: its table, its answer in words, and a recorded run that `report` draws."""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from regtopk.core.words import counted
from regtopk.lab.plan.asked import make_algorithm, probe
from regtopk.lab.plan.costs import Calibration
from regtopk.lab.plan.learning import about
from regtopk.lab.plan.methods import DENSE, POWERSGD, TORCH, Method
from regtopk.lab.plan.predict import ROUND_SHARE, ROUNDS, Plan, Prediction, predict
from regtopk.lab.plan.units import format_bandwidth, format_factor, format_size, format_time
from regtopk.lab.runs import Panel, Record, RunWriter, make_header

BANDWIDTHS = [10 ** (6 + n / 8) for n in range(37)]  # 1 Mbit/s to 30 Gbit/s and more
WORKERS = [2**n for n in range(1, 13)]
MAX_CURVES = 8
LINKS = "bandwidth of a link, Mbit/s"


def write_run(
    folder: Path, plan: Plan, costs: Calibration, summary: dict[str, Any], *, command: str, force: bool
) -> None:
    """Write the plan's curves and its table into a folder.

    Raises:
        OutputError: the folder cannot be written, or holds a run.
    """
    here, bandwidth = plan.situation, format_bandwidth(plan.situation.link.bandwidth)
    axes = (
        ("bandwidth", "mbit_per_s", LINKS, f"{here.num_workers} workers, links of any bandwidth",
         here.link.bandwidth / 1e6, bandwidth),
        ("workers", "num_workers", "workers", f"{bandwidth}, any number of workers",
         here.num_workers, f"{here.num_workers} workers"),
    )  # fmt: skip
    panel = partial(
        Panel, y="speedup", y_label="speed-up to a loss, over dense", log_x=True, log_y=True, dots="here"
    )
    header = make_header(
        "plan",
        title="Is compression worth it on this link?",
        about="Curves: how much sooner than DDP without a hook each method reaches a loss, in its best way. "
        "Where no record says how many steps it needs, as many as dense are assumed: (per step).",
        command=command,
        config=summary["inputs"],
        panels=[
            panel(title=title, x=x, x_label=x_label, where={"against": against}, mark=mark, mark_label=label)
            for against, x, x_label, title, mark, label in axes
        ],
    )
    with RunWriter(folder, header, force=force) as writer:
        for record in curves(plan, costs):
            writer.add(record)
        writer.finish({**summary, "finding": verdict(plan), "table": table(plan)})


def curves(plan: Plan, costs: Calibration) -> list[Record]:
    """Each method's speed-up to a loss on links of all bandwidths, and with all numbers of workers."""
    here, records = plan.situation, []
    bandwidths = sorted({*BANDWIDTHS, here.link.bandwidth})
    num_workers = sorted({*WORKERS, here.num_workers})
    places = [("bandwidth", "mbit_per_s", b / 1e6, here.at(bandwidth=b)) for b in bandwidths]
    places += [("workers", "num_workers", n, here.at(num_workers=n)) for n in num_workers]
    labels = {row.method.label: _drawn(row) for row in plan.best_by_label()[:MAX_CURVES]}
    for against, x, value, there in places:
        predicted = [predict(p.method, there, costs) for p in plan.predictions]
        dense_s = next(p.time_to_loss for p in predicted if p.method == DENSE)
        for label, drawn in labels.items():
            best = min((p for p in predicted if p.method.label == label), key=lambda p: p.rank)
            records.append(
                {"method": drawn, "against": against, x: value, "speedup": dense_s / best.time_to_loss}
            )
            if there == here:
                records[-1]["here"] = records[-1]["speedup"]
    order = list(labels.values())
    return sorted(records, key=lambda record: order.index(record["method"]))


def _drawn(row: Prediction) -> str:
    """The name of a curve."""
    return row.method.label if row.relative_steps is not None else f"{row.method.label} (per step)"


def table(plan: Plan) -> list[dict[str, str]]:
    """One row per method in its best way: dense, and then the best first."""
    has_updates = bool(plan.affordable_rounds())
    return [
        {
            "measure": _drawn(p),
            "density": p.method.amount,
            "values": p.method.value_code,
            "collective": p.method.collective,
            ("payload per step" if has_updates else "payload"): format_size(p.exchange.bytes_per_step),
            "step": format_time(p.step_time_s),
            "steps": _steps(p),
            "speed-up": _speedup(plan, p),
        }
        for p in plan.best_by_label()
    ]


def _steps(p: Prediction) -> str:
    """Over dense's."""
    return (
        "?" if p.relative_steps is None else "never" if p.relative_steps == inf else f"{p.relative_steps:.2f}"
    )


def _speedup(plan: Plan, p: Prediction) -> str:
    """To a loss: no more than that of a step."""
    most = "" if p.relative_steps is not None else "at most "
    return f"{most}{format_factor(plan.speedup_to_loss(p))}"


def verdict(plan: Plan) -> str:
    """The answer, in a few plain sentences."""
    where = f"{plan.situation.num_workers} workers at {format_bandwidth(plan.situation.link.bandwidth)}"
    best, step = plan.best, format_time(plan.best.step_time_s)
    if plan.pays and best.relative_steps is not None:
        said = f"Compression pays with {where}: {_in_words(best.method)}, reaches a loss "
        said += (
            f"{format_factor(plan.speedup_to_loss(best))} times as fast as dense. A step takes {step}, and "
        )
        said += f"{best.relative_steps:.2f} times as many are needed."
    elif plan.pays:
        said = (
            f"Compression pays with {where}, if as many steps are needed: {_in_words(best.method)}, makes a "
        )
        said += f"step {format_factor(plan.speedup(best))} times as fast as dense, {step}."
    else:
        said = f"Compression does not pay with {where}: {best.method.label} is fastest, {step} per step."
    said += f" {_share_of_communication(plan, best)}"
    if plan.break_even_bits_per_s is not None:
        return f"{said} Below {format_bandwidth(plan.break_even_bits_per_s)} it pays, above it does not."
    return f"{said} It pays at every bandwidth." if plan.pays else f"{said} It pays at no bandwidth."


def _share_of_communication(plan: Plan, p: Prediction) -> str:
    """How much of a step is not computation."""
    share = 1 - plan.situation.link.compute_s / p.step_time_s
    return f"The exchange takes {share:.0%} of a step."


def _in_words(method: Method, name: str | None = None) -> str:
    name = name or method.label
    if method == POWERSGD:
        return f"{name} of {method.amount}"
    return f"{name}, density {method.amount}, {method.value_code} values by {method.collective}"


def as_code(method: Method) -> str:
    """The line of Python that does what a method of this library does."""
    algorithm = make_algorithm(method.name, method.density, method.value_code)
    given = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}
    told = {f.name: given[f.name] for f in fields(algorithm) if given[f.name] != f.default}
    made = f"regtopk.{type(algorithm).__name__}({_arguments(told)})"
    options: dict[str, Any] = {}
    if len(probe(method.name, method.density, method.value_code).ways) > 1:
        options["collective"] = method.collective
    if not method.rounds.has_updates:
        return f"exchange = regtopk.attach(model, {', '.join(filter(None, (made, _arguments(options))))})"
    words = _arguments({"every": method.rounds.every} | method.turns | options)
    if method.rounds.outer != "none":
        settings = _arguments(method.rounds.outer_settings._asdict())
        words += f", outer=lambda p: torch.optim.SGD(p, {settings})"
    return f"exchange = regtopk.UpdateExchange(model, optimizer, {made}, {words})"


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def summary(plan: Plan, inputs: dict[str, Any]) -> dict[str, Any]:
    """What --json prints."""

    def row(p: Prediction) -> dict[str, Any]:
        rounds = p.method.rounds
        return {
            "name": p.method.name,
            "density": p.method.density,
            "value_code": p.method.value_code,
            "collective": p.method.collective,
            "exchange": rounds.exchange,
            "every": rounds.every,
            "delay": rounds.delay,
            "fragments": rounds.fragments,
            "payload_bytes": p.exchange.payload_bytes,
            "bytes_per_step": p.exchange.bytes_per_step,
            "step_time_s": p.step_time_s,
            "speedup": plan.speedup(p),
            "is_recorded": p.relative_steps is not None,
            "relative_steps": None if p.relative_steps == inf else p.relative_steps,
            "speedup_to_loss": None if p.relative_steps is None else plan.speedup_to_loss(p),
        }

    return {
        "inputs": inputs,
        "methods": [row(prediction) for prediction in plan.predictions],
        "best": row(plan.best),
        "break_even_bits_per_s": plan.break_even_bits_per_s,
        "pays": plan.pays,
        "notes": [assumed(inputs), *notes(plan, inputs["memory_bytes"])],
    }


def assumed(inputs: Mapping[str, Any]) -> str:
    """What the answer rests on."""
    machine = inputs["calibration"]
    workers, threads = machine.get("local_workers") or 1, machine.get("num_threads") or 1
    latency = format_time(inputs["latency_s"]) if inputs["latency_s"] else "0"
    said = (
        f"Assumed: latency {latency} one way; {format_time(inputs['step_time_s'])} for a step without "
        f"communication; {counted(workers, 'worker')} per machine, with {counted(threads, 'thread')} each; "
        f"vectors selected and coded on {machine.get('device') or 'cpu'}; gloo's collectives. fp16 and "
        "powersgd are torch's own hooks."
    )
    if machine.get("device") == "cuda":
        said += " NCCL, and faster links inside a machine, are not in this model."
    return said


def notes(plan: Plan, memory_bytes: float) -> list[str]:
    """What one should know beside the numbers."""
    said = [
        "A faster step is not a better one: 'steps' says how many a method needs to the loss that dense has "
        f"after one. It comes from our records ({about(plan.situation.optimizer)}) of the method, or of one "
        "that sends less. Your model will differ. '?' means that there is no record (docs/planning.md)."
    ]
    if plan.situation.optimizer == "sgd":
        said.append("With Adam, ask for --exchange updates: sparse gradients learn slowly there.")
    if plan.best.method not in TORCH:
        said.append(f"The best, on every rank: {as_code(plan.best.method)}")
    for p, every in plan.affordable_rounds():
        costs = f"A round of {_in_words(p.method, p.method.kind)}, costs"
        said.append(
            f"{costs} at most {ROUND_SHARE:.0%} of the computation from --every {every} on; "
            "with rarer rounds a step learns less (docs/transformers.md)."
            if every
            else f"{costs} more than {ROUND_SHARE:.0%} of the computation even with --every {ROUNDS[-1]}."
        )
    if plan.not_measured:
        names = ", ".join(dict.fromkeys(method.label for method in plan.not_measured))
        said.append(f"Left out, since this calibration has not measured all of their work: {names}.")
    if plan.too_large:
        worst = max(plan.too_large, key=lambda p: p.exchange.memory_bytes)
        said.append(
            f"Left out: {len(plan.too_large)} ways for which the messages of {plan.situation.num_workers} "
            f"workers do not fit {format_size(memory_bytes)} of memory; the most, "
            f"{format_size(worst.exchange.memory_bytes)}, takes {_in_words(worst.method)}."
        )
    return said
