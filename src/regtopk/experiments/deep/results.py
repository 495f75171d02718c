"""From the records of deep trainings, one a (method, seed, step), to tables and figures."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from regtopk.experiments.compare import is_topk
from regtopk.experiments.compare_config import parse_like
from regtopk.experiments.deep.config import DeepConfig
from regtopk.experiments.deep.finding import LAST_EVALUATIONS, LEAST_SEEDS, MOST_BYTES, finding
from regtopk.experiments.deep.method import Method
from regtopk.experiments.experiment import Summary
from regtopk.experiments.methods import parse_method
from regtopk.experiments.statistics import paired_difference, spread
from regtopk.runs import Panel, Record

PICKING_SEEDS = (0, 1)  # the best method is chosen on these, and its gain measured on the others
NOT_PRACTICAL = ("global-topk", "dense")  # asks for what no cluster can know; sends everything


def is_finished(records: Sequence[Record], config: DeepConfig, label: str, seed: int) -> bool:
    """Whether a (method, seed) ran to its end."""
    last = label, seed, config.num_rounds
    return any((r["method"], r["seed"], r["step"]) == last for r in records)


def summarise(config: DeepConfig, records: Sequence[Record]) -> Summary:
    """Every finished method: accuracy by seed, mean, spread, bytes, time, and the difference from Top-k."""
    finals = _finals(config, records)
    is_base = _is_like if config.like else _is_topk
    bases = [label for label in finals if is_base(config, label)]
    base = _best(finals, bases) if config.like else _plainest(config, bases)
    results = [_result(config, records, label, finals, base) for label in finals]
    num_bytes = {r["method"]: r["payload_bytes_per_step"] for r in results}
    claim = _claim(finals, bases, num_bytes) if config.like else None
    return {
        "preset": config.preset,
        "metric": "accuracy",
        "base": base,
        "results": results,
        "claim": claim,
        "finding": finding(config, results, base, claim),
        "minutes": sum(result["minutes"] for result in results),
        "hardware": sorted({r["hardware"] for r in records}),
        "software": sorted({r["software"] for r in records}),
        "table": _table(results, "from base" if config.like else "from Top-k"),
    }


def _is_topk(config: DeepConfig, label: str) -> bool:
    return is_topk(Method.parse(label, lr=config.lr).spec)


def _plainest(config: DeepConfig, bases: Sequence[str]) -> str | None:
    """Top-k with the protocol's own settings; without such, the first."""
    plain = Method("topk", "topk", config.lr)
    same = [b for b in bases if replace(Method.parse(b, lr=config.lr), label=plain.label) == plain]
    return next(iter([*same, *bases]), None)


def _is_like(config: DeepConfig, label: str) -> bool:
    """Whether a method is the one whose bytes all of them have, with any lr."""
    method = Method.parse(label, lr=config.lr)
    name, options = parse_method(method.spec)
    own = name, options.get("density"), method.index_code, options.get("value_code", config.value_code)
    return own == parse_like(config.like)


def _best(finals: dict[str, dict[int, float]], labels: Sequence[str]) -> str | None:
    """The most accurate on the picking seeds, of those that ran on them all; without such, the first."""
    picked = [label for label in labels if all(seed in finals[label] for seed in PICKING_SEEDS)]
    if not picked:
        return next(iter(labels), None)
    return max(picked, key=lambda label: _accuracy_there(finals[label]))


def _accuracy_there(own: dict[int, float]) -> float:
    return fmean(own[seed] for seed in PICKING_SEEDS)


def _finals(config: DeepConfig, records: Sequence[Record]) -> dict[str, dict[int, float]]:
    """Accuracy of each finished run, by method and seed."""
    runs: dict[str, dict[int, dict[int, float]]] = {}
    for r in records:
        runs.setdefault(r["method"], {}).setdefault(r["seed"], {})[r["step"]] = r["accuracy"]
    finals: dict[str, dict[int, float]] = {}
    for label, by_seed in runs.items():
        for seed, curve in sorted(by_seed.items()):
            if config.num_rounds in curve:
                last = [curve[step] for step in sorted(curve)[-LAST_EVALUATIONS:]]
                finals.setdefault(label, {})[seed] = fmean(last)
    return finals


def _result(
    config: DeepConfig,
    records: Sequence[Record],
    label: str,
    finals: dict[str, dict[int, float]],
    base: str | None,
) -> dict[str, Any]:
    own = finals[label]
    last = {r["seed"]: r for r in records if r["method"] == label and r["step"] == config.num_rounds}
    ends = [last[seed] for seed in own]
    mean, std = spread(list(own.values()))
    return {
        "method": label,
        "density": ends[0]["density"],
        "lr": ends[0]["lr"],
        "seeds": list(own),
        "final": list(own.values()),
        "mean": mean,
        "std": std,
        "payload_bytes_per_step": fmean(r["payload_bytes"] / r["step"] for r in ends),
        "difference_from_topk": None if base in (None, label) else difference(own, finals[base]),
        "diverged": [r["seed"] for r in ends if r["diverged"]],
        "minutes": sum(r["time_s"] for r in ends) / 60,
        "seconds_a_run": fmean(r["time_s"] for r in ends),
        "compress_share": sum(r["compress_s"] for r in ends) / sum(r["time_s"] for r in ends),
    }


def difference(own: dict[int, float], base: dict[int, float]) -> dict[str, Any] | None:
    """Of the seeds both have; None if there is none."""
    shared = [seed for seed in own if seed in base]
    if not shared:
        return None
    found = paired_difference([own[seed] for seed in shared], [base[seed] for seed in shared])
    return {**found, "seeds": shared}


def _claim(
    finals: dict[str, dict[int, float]], bases: Sequence[str], num_bytes: dict[str, float]
) -> dict[str, Any] | None:
    """The best practical method on the picking seeds within the bytes, and its gain on fresh seeds.

    Both sides have the lr, of those that were run, that is best for them on the picking seeds.
    """
    base = _best(finals, bases)
    if base is None:
        return None
    candidates = [
        label
        for label, own in finals.items()
        if label not in bases
        and num_bytes[label] <= MOST_BYTES * num_bytes[base]
        and all(seed in own for seed in PICKING_SEEDS)
        and Method.parse(label, lr=1.0).spec.split(":")[0] not in NOT_PRACTICAL
    ]
    best = _best(finals, candidates)
    if best is None:
        return None
    fresh = {seed: value for seed, value in finals[best].items() if seed not in PICKING_SEEDS}
    return {
        "method": best,
        "picked_on": list(PICKING_SEEDS),
        "accuracy_there": _accuracy_there(finals[best]),
        "against": base,
        "bytes_per_step": {label: num_bytes[label] for label in (best, base)},
        "gain": difference(fresh, finals[base]),
    }


def _table(results: Sequence[dict[str, Any]], difference_name: str) -> list[dict[str, Any]]:
    rows = []
    for result in sorted(results, key=lambda r: (bool(r["diverged"]), -r["mean"])):  # diverged ones last
        found = result["difference_from_topk"]
        has_interval = found is not None and len(found["seeds"]) >= LEAST_SEEDS
        rows.append(
            {
                "measure": result["method"],
                "density": result["density"],
                "bytes a step": round(result["payload_bytes_per_step"]),
                "lr": result["lr"],
                "accuracy": result["mean"],
                "± std": result["std"],
                "seeds": len(result["seeds"]),
                difference_name: None if found is None else found["mean"],
                "95 % interval": f"{found['low']:+.2f} … {found['high']:+.2f}" if has_interval else None,
                "diverged": len(result["diverged"]) or None,
                "s a run": result["seconds_a_run"],
                "compress, %": 100 * result["compress_share"],
            }
        )
    return rows


def panels(config: DeepConfig) -> Sequence[Panel]:
    """Accuracy and loss by round (beside the published curves), and accuracy by bytes."""
    y_label = "test accuracy, %"
    by_round = Panel("Accuracy, by rounds", "step", "accuracy", "round", y_label)
    if config.is_as_published:
        by_round = Panel(
            "Accuracy, by rounds; published as circles",
            "step",
            "accuracy",
            "round",
            y_label,
            dots="published",
        )
    return (
        by_round,
        Panel("Training loss", "step", "loss", "round", "training loss"),
        Panel(
            "Accuracy, by bytes", "payload_bytes", "accuracy", "bytes a worker has contributed", y_label,
            log_x=True,
        ),
    )  # fmt: skip
