"""From the records of a comparison, one for each (method, seed, step), to final numbers and a table."""

import math
from collections.abc import Sequence
from functools import cache
from statistics import fmean, stdev
from typing import Any

from regtopk.core.options import counted
from regtopk.lab.experiments.compare.config import CompareConfig, MethodAt
from regtopk.lab.experiments.experiment import Summary
from regtopk.lab.method import Method
from regtopk.lab.runs import Record
from regtopk.rounds import GRADIENTS

LEAST_SEEDS = 3  # for an interval; with two seeds it is tens of points wide
BASES = {"topk": "from Top-k", "dense": "from dense"}  # columns, by what differences are taken from
PICKING_SEEDS = (0, 1)  # of several learning rates of a base, the best is chosen on these
CERTAINTY = 0.95  # how often an interval holds the true mean

Key = tuple[str, float | None]  # a method's label, and its density where several are compared
Finals = dict[Key, dict[int, float]]  # the final number of each finished run, by seed


def is_finished(config: CompareConfig, records: Sequence[Record], run: MethodAt, seed: int) -> bool:
    """Whether a method's seed ran to its end."""
    last = run.method.label, seed, config.stops[-1]
    return any(
        (r["method"], r["seed"], r["step"]) == last and _key(config, r)[1] in (None, run.density)
        for r in records
    )


def summarise(config: CompareConfig, records: Sequence[Record]) -> Summary:
    """Every finished method: its final numbers by seed, mean, spread, bytes, time, and the difference."""
    finals = _finals_of(config, records)
    lost = {_key(config, r) for r in records if r["diverged"]}
    results = [_result(config, records, key, finals, _base_of(config, finals, lost, key)) for key in finals]
    return {
        "task": config.task,
        "better": "higher" if config.kind.is_better_higher else "smaller",
        "metric": config.kind.metric,
        "results": results,
        "minutes": sum(result["minutes"] for result in results),
        "hardware": sorted({r["hardware"] for r in records}),
        "software": sorted({r["software"] for r in records}),
        "table": _table(config, results),
    }


def _key(config: CompareConfig, record: Record) -> Key:
    has_densities = not config.is_at_equal_bytes and len(config.densities) > 1
    return record["method"], record["density"] if has_densities else None


def _finals_of(config: CompareConfig, records: Sequence[Record]) -> Finals:
    """The mean of the last evaluations of each finished run."""
    curves: dict[Key, dict[int, dict[int, float]]] = {}
    for r in records:
        curves.setdefault(_key(config, r), {}).setdefault(r["seed"], {})[r["step"]] = r[config.kind.metric]
    finals: Finals = {}
    for key, by_seed in curves.items():
        for seed, curve in sorted(by_seed.items()):
            if config.stops[-1] in curve:
                last = [curve[step] for step in sorted(curve)[-config.kind.num_last :]]
                finals.setdefault(key, {})[seed] = fmean(last)
    return finals


def _base_of(config: CompareConfig, finals: Finals, lost: set[Key], key: Key) -> Key | None:
    """What a method's difference is taken from: Top-k, or dense on some tasks.

    It is the method that `like` names, if that ran and is of the base's algorithm: with the best of its
    learning rates that did not diverge. Else, of several Top-k at the same density, it is the plain one, or
    the first. Methods that exchange updates are no base.
    """
    base = config.kind.base
    methods = {k: Method.read(k[0]) for k in finals}
    bases = [
        k
        for k, method in methods.items()
        if (method.algorithm, method.rounds) == (base, GRADIENTS)
        and (base == "dense" or key[1] in (None, k[1]))
    ]
    alike = [k for k in bases if config.is_like(methods[k])]
    if alike:
        return _best_of(finals, [k for k in alike if k not in lost] or alike)
    plain = [k for k in bases if methods[k].is_same(Method(base, base))]
    return next(iter([*plain, *bases]), None)


def _best_of(finals: Finals, keys: Sequence[Key]) -> Key:
    """The best on the picking seeds, of those that ran on them all; without such, the first."""
    picked = [key for key in keys if all(seed in finals[key] for seed in PICKING_SEEDS)]
    if not picked:
        return keys[0]
    return max(picked, key=lambda key: fmean(finals[key][seed] for seed in PICKING_SEEDS))


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
    """The t that |T| stays below with a probability of 95 %.

    Args:
        num_free: degrees of freedom of T, >= 1: for a mean of n differences, n - 1.
    """
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


def _result(
    config: CompareConfig, records: Sequence[Record], key: Key, finals: Finals, base: Key | None
) -> dict[str, Any]:
    own = finals[key]
    last = {r["seed"]: r for r in records if _key(config, r) == key and r["step"] == config.stops[-1]}
    ends = [last[seed] for seed in own]
    values = list(own.values())
    return {
        "method": key[0],
        "density": ends[0]["density"],
        "value_code": ends[0].get("value_code"),
        "optimizer": config.optimizer_of(Method.read(key[0])),
        "lr": ends[0]["lr"],
        "seeds": list(own),
        "final": values,
        "mean": fmean(values),
        "std": stdev(values) if len(values) > 1 else None,
        "payload_bytes_per_step": fmean(r["payload_bytes"] for r in ends) / config.stops[-1],
        f"difference_from_{config.kind.base}": None if base in (None, key) else difference(own, finals[base]),
        "diverged": [r["seed"] for r in ends if r["diverged"]],
        "minutes": sum(r["time_s"] for r in ends) / 60,
        "seconds_a_run": fmean(r["time_s"] for r in ends),
        "compress_share": sum(r["compress_s"] for r in ends) / sum(r["time_s"] for r in ends),
    }


def _table(config: CompareConfig, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per method, the best first and those that diverged last."""
    sign = -1 if config.kind.is_better_higher else 1
    rows = sorted(results, key=lambda r: (bool(r["diverged"]), sign * r["mean"]))
    return [_row(config, result) for result in rows]


def _row(config: CompareConfig, result: dict[str, Any]) -> dict[str, Any]:
    found = result[f"difference_from_{config.kind.base}"]
    digits = "+.2f" if config.kind.metric == "accuracy" else "+.3g"
    interval = None
    if found is not None and len(found["seeds"]) >= LEAST_SEEDS:
        interval = f"{found['low']:{digits}} … {found['high']:{digits}}"
    return {
        "measure": result["method"],
        "density": result["density"],
        "bytes a step": round(result["payload_bytes_per_step"]),
        "lr": result["lr"],
        config.kind.metric: result["mean"],
        "± std": result["std"],
        "seeds": len(result["seeds"]),
        BASES[config.kind.base]: found and found["mean"],
        "95 % interval": interval,
        "diverged": counted(len(result["diverged"]), "seed") if result["diverged"] else None,
        "s a run": result["seconds_a_run"],
        "compress, %": 100 * result["compress_share"],
    }
