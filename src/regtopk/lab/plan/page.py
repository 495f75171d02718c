"""A plan for people: its table, its answer in words, and a recorded run that `report` draws."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from regtopk.core.options import counted
from regtopk.lab.method import Method
from regtopk.lab.plan.costs import Calibration
from regtopk.lab.plan.exchange import POWERSGD_RANK
from regtopk.lab.plan.learning import OPTIMIZERS, about
from regtopk.lab.plan.link import NCCL_HOP_S
from regtopk.lab.plan.methods import DENSE, FP16, POWERSGD, TORCH, PlannedMethod, advised_with, words_of
from regtopk.lab.plan.predict import EQUAL, FAST, LinkPlan, Prediction, predict
from regtopk.lab.plan.units import format_bandwidth, format_factor, format_size, format_time
from regtopk.lab.runs import Panel, Record, RunWriter, make_header
from regtopk.recipes import INDEX_CODE, MANY_FROM, MORE_FROM, for_workers

BANDWIDTHS = [10 ** (6 + n / 8) for n in range(37)]  # 1 Mbit/s to 30 Gbit/s and more
WORKERS = [2**n for n in range(1, 13)]
MAX_CURVES = 8
UNKNOWN = "Faster links are not predicted: machines talk there by RDMA or NVLink."
GLOO = "gloo's collectives, over TCP, whose trips link= may shorten"
NCCL = f"NCCL's collectives, over TCP, with {format_time(NCCL_HOP_S)} per hop beside the latency"
SURE_OF_CPUS = "predicted steps were within 30 % of those measured with gloo on 2 and 4 CPU ranks"
SURE_OF_GPUS = "no step between machines with GPUs was measured; docs/when-it-pays.md compares those of one"


def write_run(
    folder: Path, plan: LinkPlan, costs: Calibration, summary: dict[str, Any], *, command: str, force: bool
) -> None:
    """Write the plan's curves and its table into a folder."""
    num_workers, bandwidth = plan.situation.num_workers, plan.situation.link.bandwidth
    shown, workers = format_bandwidth(bandwidth), f"{num_workers} workers"
    panel = partial(
        Panel, y="speedup", y_label="speed-up to a loss, over dense", log_x=True, log_y=True, dots="here"
    )
    by_bandwidth = panel(
        title=f"{workers}, links of any bandwidth", x="mbit_per_s", x_label="bandwidth of a link, Mbit/s",
        where={"against": "bandwidth"}, mark=bandwidth / 1e6, mark_label=shown,
    )  # fmt: skip
    by_workers = panel(
        title=f"{shown}, by the number of workers", x="num_workers", x_label="workers",
        where={"against": "workers"}, mark=num_workers, mark_label=workers,
    )  # fmt: skip
    header = make_header(
        "plan",
        title="Is compression worth it on this link?",
        about=f"{summary['basis']} Curves: how much sooner than DDP without a hook each method reaches a "
        "loss, in its best way. Where no record says how many steps it needs, its curve says 'per step'.",
        command=command,
        config=summary["inputs"],
        panels=[by_bandwidth, by_workers],
    )
    with RunWriter(folder, header, force=force) as writer:
        for record in curves(plan, costs):
            writer.add(record)
        writer.finish({**summary, "finding": verdict(plan), "table": table(plan)})


def curves(plan: LinkPlan, costs: Calibration) -> list[Record]:
    """Each method's speed-up to a loss on links of all bandwidths, and with all numbers of workers."""
    here, records = plan.situation, []
    bandwidths = sorted({*BANDWIDTHS, here.link.bandwidth})
    num_workers = sorted({*WORKERS, here.num_workers})
    if any(p.method in advised_with("muon") for p in plan.predictions):  # for many there are other recipes
        mine = set(map(words_of, for_workers(here.num_workers)))
        num_workers = [n for n in num_workers if mine <= set(map(words_of, for_workers(n)))]
    places = [({"against": "bandwidth", "mbit_per_s": b / 1e6}, here.at(b)) for b in bandwidths]
    places += [({"against": "workers", "num_workers": n}, replace(here, num_workers=n)) for n in num_workers]
    for row in plan.best_by_label()[:MAX_CURVES]:
        ways = [p.method for p in plan.predictions if p.method.label == row.method.label]
        for place, there in places:
            best = min((predict(way, there, costs) for way in ways), key=lambda p: p.rank)
            speedup = predict(DENSE, there, costs).time_to_loss / best.time_to_loss
            record = {"method": _drawn(row), **place, "speedup": speedup}
            records.append({**record, "here": speedup} if there == here else record)
    return records


def _drawn(row: Prediction) -> str:
    return row.method.label + (" (per step)" if row.relative_steps is None else "")


def table(plan: LinkPlan) -> list[dict[str, str]]:
    """One row per method in its best way: dense, and then the best first."""
    return [
        {
            "measure": _drawn(p),
            "density": f"rank {POWERSGD_RANK}" if p.method == POWERSGD else f"{p.method.density:g}",
            "values": p.method.value_code,
            "received per step": format_size(p.exchange.received_bytes_per_step),
            "step": format_time(p.step_time_s),
            "steps": {None: "?", inf: "never"}.get(p.relative_steps) or f"{p.relative_steps:.2f}",
            "speed-up": ("<= " if p.relative_steps is None else "") + format_factor(plan.speedup_to_loss(p)),
        }
        for p in plan.best_by_label()
    ]


def verdict(plan: LinkPlan) -> str:
    """The answer: what to use, what it gains, and up to which bandwidth."""
    best, link = plan.best, plan.situation.link
    where = f"for {OPTIMIZERS[plan.situation.optimizer]} with {plan.situation.num_workers} workers"
    where += f" at {format_bandwidth(link.bandwidth)}"
    if link.bandwidth >= FAST:
        return f"Compression is not advised {where}: use no hook, unless you measure a gain. {UNKNOWN}"
    exchange_s, steps = best.step_time_s - link.compute_s, best.relative_steps
    share = f"A step takes {format_time(best.step_time_s)}. "
    share += f"The exchange takes {exchange_s / best.step_time_s:.0%} of a step"
    share += f", {plan.work_s / exchange_s:.0%} of it local work." if exchange_s > 0 else "."
    pays = "pays" if steps is not None else "may pay"
    if not plan.pays:
        use = "no hook" if best.method == DENSE else "torch's fp16 hook"
        said = f"Compression does not pay {where}: use {use}. {share}"
    else:
        faster = format_factor(plan.speedup_to_loss(best))
        fp16 = next(p for p in plan.predictions if p.method == FP16)
        over_fp16 = format_factor(fp16.time_to_loss / best.time_to_loss)
        gain = f"reaches a loss {faster} times as fast as dense, in {steps or 1:.2f} times as many steps, "
        gain += f"and {over_fp16} times as fast as torch's fp16 hook"
        if steps is None:
            gain = f"makes a step {faster} times as fast as dense. How many steps it needs is not recorded"
        said = f"Compression {pays} {where}: {_named(best.method)} {gain}. {share}"
    if plan.break_even_bits_per_s is None:
        return f"{said} It pays at no bandwidth."
    ends = f". {UNKNOWN}" if plan.break_even_bits_per_s > 0.99 * FAST else ", above it does not."
    return f"{said} Below {format_bandwidth(plan.break_even_bits_per_s)} it {pays}{ends}"


def _named(method: PlannedMethod) -> str:
    """A method and what it sends, in a sentence."""
    if method == POWERSGD:
        return f"powersgd of rank {POWERSGD_RANK}"
    return f"{method.label} (density {method.density:g}, {method.value_code} values)"


def as_code(method: PlannedMethod, inner: str = "optimizer", link: str = "") -> str:
    """The line of Python that does what a method of this library does; updates are told the link."""
    algorithm = Method.parse(method.name).build(density=method.density, value_code=method.value_code)
    told = {f.name: x for f in fields(algorithm) if (x := getattr(algorithm, f.name)) != f.default}
    made = f"regtopk.{type(algorithm).__name__}({_arguments(told)})"
    coded = {} if method.index_code == INDEX_CODE else {"index_code": method.index_code}
    if not method.rounds.has_updates:
        return f"exchange = regtopk.attach({', '.join(filter(None, ['model', made, _arguments(coded)]))})"
    words = _arguments(method.turns | coded)
    if method.rounds.outer != "none":
        settings = _arguments(method.rounds.outer_settings._asdict())
        words += f", outer=lambda p: torch.optim.SGD(p, {settings})"
    return f"exchange = regtopk.UpdateExchange(model, {inner}, {made}, {words}{link})"


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def basis(machine: Mapping[str, Any], why: str, is_measured: bool) -> str:
    """What the plan is for, and which costs it rests on: said first."""
    busy = f" Busy when they were measured ({machine['busy']}): --recalibrate." if "busy" in machine else ""
    if machine["device"] == "cpu":
        where = f"cpu with {counted(machine.get('num_threads', 1), 'thread')}"
        return f"Planned for CPUs ({why}). Work has costs measured on {where}, collectives are gloo's.{busy}"
    costs = "measured on" if is_measured else "recorded on another machine's"
    assumed = ", ".join(filter(None, ["NCCL's collectives", machine.get("assumed")]))
    said = f"Planned for GPUs ({why}). Work has costs {costs} {machine['device']}. "
    return f"{said}Assumed, not measured: {assumed}.{busy}"


def summary(plan: LinkPlan, inputs: dict[str, Any], basis: str) -> dict[str, Any]:
    """What --json prints."""
    return {
        "basis": basis,
        "inputs": inputs,
        "methods": [_row(plan, prediction) for prediction in plan.predictions],
        "best": _row(plan, plan.best),
        "break_even_bits_per_s": plan.break_even_bits_per_s,
        "pays": plan.pays,
        "notes": _notes(plan, inputs["calibration"]),
    }


def _row(plan: LinkPlan, p: Prediction) -> dict[str, Any]:
    return {
        "name": p.method.name,
        "density": p.method.density,
        "value_code": p.method.value_code,
        "collective": p.exchange.collective,
        **{name: getattr(p.method.rounds, name) for name in ("exchange", "every", "delay", "fragments")},
        "payload_bytes": p.exchange.payload_bytes,
        "bytes_per_step": p.exchange.bytes_per_step,
        "sent_bytes_per_step": p.exchange.received_bytes_per_step,
        "received_bytes_per_step": p.exchange.received_bytes_per_step,
        "float32_ring_over_received": plan.ring_over_received(p, 4),
        "bfloat16_ring_over_received": plan.ring_over_received(p, 2),
        "step_time_s": p.step_time_s,
        "speedup": plan.dense.step_time_s / p.step_time_s,
        "is_recorded": p.relative_steps is not None,
        "relative_steps": None if p.relative_steps == inf else p.relative_steps,
        "speedup_to_loss": None if p.relative_steps is None else plan.speedup_to_loss(p),
    }


def _notes(plan: LinkPlan, machine: Mapping[str, Any]) -> list[str]:
    """What to paste, what the answer rests on, how sure it is, and when to use none of it."""
    link, method, is_cpu = plan.situation.link, plan.best.method, machine["device"] == "cpu"
    inner = "[muon, adamw]" if plan.situation.optimizer == "muon" else "optimizer"
    known = f", link=regtopk.Link(bandwidth={link.bandwidth:g}, latency_s={link.latency_s:g})"
    said = [f"Paste, on every rank: {as_code(method, inner, known)}"] if method not in TORCH else []
    rows = [p for p in plan.best_by_label() if p.relative_steps is not None]
    fastest = min(rows, key=lambda p: (float(f"{p.time_to_loss:.3g}"), p.method.algorithm != "topk"))
    named = [method]
    if link.bandwidth < FAST and fastest.time_to_loss < plan.best.time_to_loss / EQUAL:
        named.append(fastest.method)
        faster = f"{_named(fastest.method)}, {format_factor(plan.speedup_to_loss(fastest))} times as fast as"
        said.append(
            f"Predicted to be faster still: {faster} dense. It is not what docs/which-method.md advises: "
            "measure both."
        )
    if plan.situation.optimizer == "sgd":
        said.append("With AdamW or Muon give --optimizer: sparse gradients learn slowly there.")
    elif not all(p.method.rounds.has_updates or p.method in TORCH for p in plan.predictions):
        said.append("Sparse gradients learn slowly with AdamW and Muon: exchange updates instead.")
    if method in advised_with("muon"):
        large = "a GPT of 124 M parameters took 1.8 times dense Muon's steps, and ended behind"
        said.append(f"Measure yours: {large if method.algorithm == 'topk' else 'it ran with 4.8 M alone'}.")
        if plan.situation.num_workers >= MORE_FROM and link.latency_s:
            said.append("With 9 workers or more MuLoCo in 2 bits has not run: measure it, too.")
    if any(each.algorithm == "dgc" for each in named):
        said.append("DGC has momentum: give it SGD without. Its 'steps' are against dense SGD without, too.")
    if plan.situation.optimizer == "adamw":
        said.append("With Muon for the matrices ask for --optimizer muon.")
        in_part = [p.method for p in plan.predictions if p.method.returned is not None]
        if in_part and plan.situation.num_workers >= MANY_FROM:
            said.append(f"Try sums that come back in part, measured with Muon alone: {as_code(in_part[0])}")
    return [
        *said,
        f"Assumed: latency {format_time(link.latency_s) if link.latency_s else 0} one way; "
        f"{format_time(link.compute_s)} for a step without communication; {GLOO if is_cpu else NCCL}. fp16 "
        "and powersgd are torch's own hooks.",
        f"How sure: {SURE_OF_CPUS if is_cpu else SURE_OF_GPUS}. 'steps' says how many a method needs to the "
        f"loss that dense has after one, in our records ({about(plan.situation.optimizer)}) of it or of one "
        "that sends less. Your model will differ; '?' and '(per step)' mean that there is no record "
        "(docs/planning.md).",
        "Use none of it inside a machine, over InfiniBand, or where no gap to dense training is allowed.",
    ]
