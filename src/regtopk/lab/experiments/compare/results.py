"""From the records of a comparison, one for each (method, seed, step), to final numbers and a table."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from regtopk.core.words import counted
from regtopk.lab.experiments.compare.protocol import Protocol, Run
from regtopk.lab.experiments.compare.student import student_t
from regtopk.lab.experiments.experiment import Summary
from regtopk.lab.method import Method
from regtopk.lab.runs import Record
from regtopk.rounds import GRADIENTS

LEAST_SEEDS = 3  # for an interval; with two seeds it is tens of points wide
BASES = {"topk": "from Top-k", "dense": "from dense"}  # columns, by what differences are taken from
PICKING_SEEDS = (0, 1)  # the best method is chosen on these, and its gain measured on the others

Key = tuple[str, float | None]  # a method's label, and its density where several are compared
Finals = dict[Key, dict[int, float]]  # the final number of each finished run, by seed


def is_finished(config: Protocol, records: Sequence[Record], run: Run, seed: int) -> bool:
    """Whether a method's seed ran to its end."""
    last = run.method.label, seed, config.plan.stops[-1]
    return any(
        (r["method"], r["seed"], r["step"]) == last and _key(config, r)[1] in (None, run.density)
        for r in records
    )


def summarise(config: Protocol, records: Sequence[Record]) -> Summary:
    """Every finished method: its final numbers by seed, mean, spread, bytes, time, and the difference."""
    finals, lost = finals_of(config, records), diverged_of(config, records)
    results = [_result(config, records, key, finals, base_of(config, finals, lost, key)) for key in finals]
    return {
        "metric": config.plan.metric,
        "results": results,
        "minutes": sum(result["minutes"] for result in results),
        "hardware": sorted({r["hardware"] for r in records}),
        "software": sorted({r["software"] for r in records}),
        "table": _table(config, results),
    }


def finals_of(config: Protocol, records: Sequence[Record]) -> Finals:
    """The mean of the last evaluations of each finished run."""
    curves: dict[Key, dict[int, dict[int, float]]] = {}
    for r in records:
        curves.setdefault(_key(config, r), {}).setdefault(r["seed"], {})[r["step"]] = r[config.plan.metric]
    finals: Finals = {}
    for key, by_seed in curves.items():
        for seed, curve in sorted(by_seed.items()):
            if config.plan.stops[-1] in curve:
                last = [curve[step] for step in sorted(curve)[-config.plan.num_last :]]
                finals.setdefault(key, {})[seed] = fmean(last)
    return finals


def diverged_of(config: Protocol, records: Sequence[Record]) -> set[Key]:
    """The methods of which a seed diverged: its final number is from before that, and wins nothing."""
    return {_key(config, r) for r in records if r["diverged"]}


def base_of(config: Protocol, finals: Finals, lost: set[Key], key: Key) -> Key | None:
    """What a method's difference is taken from: Top-k, dense on some tasks, or the method that `like` names.

    Of several Top-k at the same density it is the plain one, or else the first. Methods that exchange updates
    are no base. If the method that `like`
    names ran with several learning rates, it is the best of those that did not diverge.
    """
    methods = {label: Method.read(label) for label, _ in finals}
    if config.plan.is_against_like:
        bases = [k for k in finals if config.is_like(methods[k[0]])]
        return best_of(finals, [k for k in bases if k not in lost] or bases)
    base = config.plan.base
    bases = [
        k
        for k in finals
        if (methods[k[0]].algorithm, methods[k[0]].rounds) == (base, GRADIENTS)
        and (base == "dense" or key[1] in (None, k[1]))
    ]
    plain = [k for k in bases if methods[k[0]].is_same(Method(base, base))]
    return next(iter([*plain, *bases]), None)


def best_of(finals: Finals, keys: Sequence[Key]) -> Key | None:
    """The best on the picking seeds, of those that ran on them all; without such, the first."""
    picked = [key for key in keys if all(seed in finals[key] for seed in PICKING_SEEDS)]
    if not picked:
        return next(iter(keys), None)
    return max(picked, key=lambda key: mean_there(finals[key]))


def mean_there(own: dict[int, float]) -> float:
    """The mean over the picking seeds."""
    return fmean(own[seed] for seed in PICKING_SEEDS)


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


def _key(config: Protocol, record: Record) -> Key:
    has_densities = not config.is_at_equal_bytes and len(config.plan.densities) > 1
    return record["method"], record["density"] if has_densities else None


def _result(
    config: Protocol, records: Sequence[Record], key: Key, finals: Finals, base: Key | None
) -> dict[str, Any]:
    own = finals[key]
    last = {r["seed"]: r for r in records if _key(config, r) == key and r["step"] == config.plan.stops[-1]}
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
        "payload_bytes_per_step": fmean(r["payload_bytes"] for r in ends) / config.plan.stops[-1],
        f"difference_from_{config.plan.base}": None if base in (None, key) else difference(own, finals[base]),
        "diverged": [r["seed"] for r in ends if r["diverged"]],
        "minutes": sum(r["time_s"] for r in ends) / 60,
        "seconds_a_run": fmean(r["time_s"] for r in ends),
        "compress_share": sum(r["compress_s"] for r in ends) / sum(r["time_s"] for r in ends),
    }


def _table(config: Protocol, results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    sign = -1 if config.plan.is_better_higher else 1
    digits = "+.2f" if config.plan.metric == "accuracy" else "+.3g"
    for result in sorted(
        results, key=lambda r: (bool(r["diverged"]), sign * r["mean"])
    ):  # diverged ones last
        found = result[f"difference_from_{config.plan.base}"]
        has_interval = found is not None and len(found["seeds"]) >= LEAST_SEEDS
        rows.append(
            {
                "measure": result["method"],
                "density": result["density"],
                "bytes a step": round(result["payload_bytes_per_step"]),
                "lr": result["lr"],
                config.plan.metric: result["mean"],
                "± std": result["std"],
                "seeds": len(result["seeds"]),
                "from base" if config.plan.is_against_like else BASES[config.plan.base]: found
                and found["mean"],
                "95 % interval": f"{found['low']:{digits}} … {found['high']:{digits}}"
                if has_interval
                else None,
                "diverged": counted(len(result["diverged"]), "seed") if result["diverged"] else None,
                "s a run": result["seconds_a_run"],
                "compress, %": 100 * result["compress_share"],
            }
        )
    return rows
