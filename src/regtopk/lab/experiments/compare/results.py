"""What came out of a comparison: from records of a method, seed and step to final numbers, table and page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean, stdev
from typing import Any

from regtopk.core.options import counted
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.experiment import Summary
from regtopk.lab.method import Method
from regtopk.lab.runs import Panel, Record
from regtopk.rounds import GRADIENTS

LEAST_SEEDS = 3  # for an interval; with two seeds it is tens of points wide
BASES = {"topk": "from Top-k", "dense": "from dense"}  # columns, by what differences are taken from
CERTAINTY = 0.95  # how often an interval holds the true mean

BY_THE_TEST = "Searches are judged by the test examples, on a seed that does not count."
BEYOND = 1.05  # of a budget: messages are not all of one length
MOVED = ("payload", "sent", "received", "dense")  # whose bytes records hold

Key = tuple[str, float | None]  # a method's label, and its density where several are compared
Curves = dict[int, list[Record]]  # the records of each finished run of a method, by seed


def key_of(config: CompareConfig, label: str, density: float | None) -> Key:
    """What tells the runs of a comparison apart, but for their seeds."""
    has_densities = not config.is_at_equal_bytes and len(config.densities) > 1
    return label, density if has_densities else None


def settings_words(settings: Mapping[str, Any]) -> str:
    """Hyperparameters in print."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def summarise(config: CompareConfig, records: Sequence[Record]) -> Summary:
    """Every finished method: its final numbers by seed, mean, spread, bytes, time, and the difference."""
    curves = finished_curves(config, records)
    results = [_result(config, key, curves) for key in curves]
    sign = -1 if config.kind.is_better_higher else 1
    best_first = sorted(results, key=lambda result: (bool(result["diverged"]), sign * result["mean"]))
    are_ranked = len({key[0] for key in curves}) > 1 and not best_first[0]["diverged"]
    return {
        "task": config.task,
        "better": "higher" if config.kind.is_better_higher else "smaller",
        "metric": config.kind.metric,
        "results": results,
        "minutes": sum(result["minutes"] for result in results),
        "hardware": sorted({r["hardware"] for r in records}),
        "software": sorted({r["software"] for r in records}),
        "table": [_row(config, result) for result in best_first],
        "notes": _notes(config, results),
        **({"finding": _finding(config, best_first)} if are_ranked else {}),
    }


def _finding(config: CompareConfig, best_first: Sequence[Mapping[str, Any]]) -> str:
    """Who ends best, and where dense or Top-k does, in a sentence."""
    best, *others = best_first
    metric, unit = config.kind.metric.replace("_", " "), " %" if config.kind.metric == "accuracy" else ""
    said = f"{best['method']} ends best of {len(best_first)}: {metric} {best['mean']:.4g}{unit}, "
    said += f"the mean of {counted(len(best['final']), 'seed')}."
    plain = [r for r in others if Method.read(r["method"]).algorithm in BASES]
    return f"{said} {plain[0]['method']} has {plain[0]['mean']:.4g}{unit}." if plain else said


def _notes(config: CompareConfig, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the test judges searches; who moves more bytes than it may, or fewer with every entry."""
    has_validation = config.task == "gpt" and config.tokens != "characters"
    notes = [] if has_validation or not any(r["search"] for r in results) else [BY_THE_TEST]
    if not config.is_at_equal_bytes:
        return notes
    budget = config.bytes_per_step or config.received_bytes_per_step
    given = f" of {budget:,.0f}" if budget else ""
    moved = {r["method"]: r[f"{config.budgeted}_per_step"] for r in results}
    notes += [
        f"{r['method']} leaves a part of the byte budget unused: density 1 moves "
        f"{moved[r['method']]:,.0f}{given} bytes per step."
        for r in results
        if r["density"] == 1
    ]
    more = [method for method, num_bytes in moved.items() if budget and num_bytes > BEYOND * budget]
    if more:
        notes.append(f"These move more than the budget{given}, for they have no density: {', '.join(more)}.")
    return notes


def finished_curves(config: CompareConfig, records: Sequence[Record]) -> dict[Key, Curves]:
    """The runs that reached their last step; of a step that was recorded twice, the later record counts."""
    found: dict[Key, dict[int, dict[int, Record]]] = {}
    for r in records:
        by_seed = found.setdefault(key_of(config, r["method"], r["density"]), {})
        by_seed.setdefault(r["seed"], {})[r["step"]] = r
    finished: dict[Key, Curves] = {}
    for key, by_seed in found.items():
        for seed, curve in sorted(by_seed.items()):
            if config.stops[-1] in curve:
                finished.setdefault(key, {})[seed] = [curve[step] for step in sorted(curve)]
    return finished


def _finals(config: CompareConfig, curves: Curves) -> dict[int, float]:
    metric, num_last = config.kind.metric, config.kind.num_last
    return {seed: fmean(r[metric] for r in curve[-num_last:]) for seed, curve in curves.items()}


def _base_of(config: CompareConfig, curves: dict[Key, Curves], key: Key) -> Key:
    """What a method's difference is taken from: Top-k, or dense on some tasks; itself, where there is none.

    It is the method whose bytes all may move if that ran, or else the plain one: the best, where several
    differ in their learning rate alone. What diverged or exchanges updates is no base.
    """
    base, best = config.kind.base, max if config.kind.is_better_higher else min
    methods = {k: replace(Method.read(k[0]), lr=None) for k in curves}
    bases = [
        k
        for k, method in methods.items()
        if (method.algorithm, method.rounds) == (base, GRADIENTS)
        and (base == "dense" or key[1] in (None, k[1]))
        and not any(curve[-1]["diverged"] for curve in curves[k].values())
    ]
    like = Method.parse_like(config.base_words) if config.base_words else None
    alike = [k for k in bases if like and methods[k].is_same(like)]
    plain = [k for k in bases if methods[k].is_same(Method(base, base))]
    candidates = alike or plain or bases[:1] or [key]
    return best(candidates, key=lambda k: fmean(_finals(config, curves[k]).values()))


def difference(own: dict[int, float], base: dict[int, float]) -> dict[str, Any] | None:
    """Mean of own - base over the seeds that both have, and its 95 % interval by Student's t.

    A single seed has no interval. Without a shared seed there is no difference: None.
    """
    shared = [seed for seed in own if seed in base]
    if not shared:
        return None
    differences = [own[seed] - base[seed] for seed in shared]
    mean, low, high = fmean(differences), None, None
    if len(differences) > 1:
        margin = student_t(len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
        low, high = mean - margin, mean + margin
    return {"mean": mean, "low": low, "high": high, "seeds": shared}


@cache
def student_t(num_free: int) -> float:
    """The t that |T| stays below with a probability of 95 %, at so many degrees of freedom."""
    low, high = 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:  # halved down to the last bit
        low, high = (angle, high) if _share_below(angle, num_free) < CERTAINTY else (low, angle)
    return math.sqrt(num_free) * math.tan(low)


def _share_below(angle: float, num_free: int) -> float:
    """P(|T| < sqrt(num_free) tan(angle)), by a finite series (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    is_odd = num_free % 2
    sine, cosine = math.sin(angle), math.cos(angle)
    total, term = 0.0, cosine if is_odd else 1.0
    for power in range(is_odd, num_free - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def _result(config: CompareConfig, key: Key, curves: dict[Key, Curves]) -> dict[str, Any]:
    finals, base = _finals(config, curves[key]), _base_of(config, curves, key)
    values = list(finals.values())
    ends = [curve[-1] for curve in curves[key].values()]
    moved: dict[str, float | None] = {}
    for name in MOVED:
        counts = [r[f"{name}_bytes"] for r in ends if f"{name}_bytes" in r]  # records may be older than it
        moved[name] = fmean(counts) / config.stops[-1] if len(counts) == len(ends) else None
    bits = [r["bits_per_byte"] for r in ends if "bits_per_byte" in r]
    less = moved["dense"] / moved["received"] if moved["dense"] and moved["received"] else None
    off_base = None if base == key else difference(finals, _finals(config, curves[base]))
    return {
        "method": key[0],
        "density": ends[0]["density"],
        "value_code": ends[0].get("value_code"),
        "optimizer": ends[0].get("optimizer"),
        "lr": ends[0]["lr"],
        "search": ends[0].get("search"),
        "seeds": list(finals),
        "final": values,
        "mean": fmean(values),
        "std": stdev(values) if len(values) > 1 else None,
        "bits_per_byte": fmean(bits) if len(bits) == len(ends) else None,
        **{f"{name}_bytes_per_step": moved[name] for name in MOVED},
        "float32_ring_over_received": less,
        "bfloat16_ring_over_received": less and less / 2,
        f"difference_from_{config.kind.base}": off_base,
        "diverged": [r["seed"] for r in ends if r["diverged"]],
        "minutes": sum(r["time_s"] for r in ends) / 60,
        "seconds_a_run": fmean(r["time_s"] for r in ends),
        "compress_share": sum(r["compress_s"] for r in ends) / sum(r["time_s"] for r in ends),
    }


def _row(config: CompareConfig, result: dict[str, Any]) -> dict[str, Any]:
    found, received = result[f"difference_from_{config.kind.base}"], result["received_bytes_per_step"]
    digits = "+.2f" if config.kind.metric == "accuracy" else "+.3g"
    has_interval = found is not None and len(found["seeds"]) >= LEAST_SEEDS
    interval = f"{found['low']:{digits}} … {found['high']:{digits}}" if has_interval else None
    search = result["search"]
    return {
        "measure": result["method"],
        "density": result["density"],
        config.kind.metric: result["mean"],
        "± std": result["std"],
        "bits per byte": result["bits_per_byte"],
        "seeds": len(result["seeds"]),
        "diverged": counted(len(result["diverged"]), "seed") if result["diverged"] else None,
        BASES[config.kind.base]: found and round(found["mean"], 12),
        "95 % interval": interval,
        "lr": result["lr"],
        "picked": search and settings_words(search["picked"]),
        "search runs": search and f"{len(search['runs'])} of {search['num_points']}",
        "at the grid's edge": (search and ", ".join(search["at_edge"])) or None,
        "payload per step": round(result["payload_bytes_per_step"]),
        "received per step": received and round(received),
        "bfloat16 ring / received": result["bfloat16_ring_over_received"],
        "s per run": result["seconds_a_run"],
        "exchange, %": 100 * result["compress_share"],  # of the time: selecting, coding and summing
    }


def panels(config: CompareConfig) -> Sequence[Panel]:
    """Loss against iterations, quality against bytes, and where each method ended."""
    metric, words = config.kind.metric, config.metric_words or config.kind.metric
    name, moved, verb = words.split(",")[0].capitalize(), "received_bytes", "received"
    if config.num_workers == 1:  # it receives nothing
        moved, verb = "payload_bytes", "contributed"
    densities = () if config.is_at_equal_bytes else config.densities
    shown = []
    for where in [{"density": density} for density in densities] or [{}]:
        suffix = f", density {where['density']:g}" if len(densities) > 1 else ""
        by_bytes, at_end = f"{name} against bytes{suffix}", f"{name} at the end{suffix}"
        shown += [
            Panel(f"Loss{suffix}", "step", "loss", "iteration", "training loss", where=where),
            Panel(by_bytes, moved, metric, f"bytes a worker has {verb}", words, where=where, log_x=True),
            Panel(at_end, "step", metric, words, "", where=where, marks="bars"),
        ]
    return shown


def description_of(config: CompareConfig) -> str:
    """What the page shows, and how runs are judged."""
    words = config.metric_words
    return (
        f"{config.task}: {config.num_workers} workers with batches of {config.batch_size}, split "
        f"{config.split}, {config.optimizer}, {config.precision}. All methods start from the same models and "
        "see the same batches. Bytes are of a worker and a local step, frames included: payload is its own "
        "messages, received what collectives bring it, which on the mean is what it sends. The ring is an "
        "all_reduce of bfloat16; one of float32 brings twice as much. "
        f"Final numbers are means of the last evaluations, {config.kind.num_last} of each run."
        + (f" It is the {words}: smaller is better." if words else "")
    )
