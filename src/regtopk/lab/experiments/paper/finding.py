"""What came out of deep trainings, in a sentence. A published result that did not come out is said first."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from regtopk.core.words import counted
from regtopk.lab.experiments.compare.results import LEAST_SEEDS
from regtopk.lab.experiments.paper.fig3_config import DeepConfig
from regtopk.lab.experiments.published import published_figure
from regtopk.lab.method import Method

MOST_BYTES = 1.02  # times the bytes of the method that others are compared with: equal bytes
NUM_PUBLISHED = 5  # how many of the figure's last points are averaged

Result = dict[str, Any]


def finding(
    config: DeepConfig, results: Sequence[Result], base: str | None, claim: dict[str, Any] | None
) -> str:
    """The sentence, and then which methods diverged."""
    sentence = (
        _at_equal_bytes(config, results, base, claim) if config.like else _by_rounds(config, results, base)
    )
    lost = [f"{r['method']} ({counted(len(r['diverged']), 'seed')})" for r in results if r["diverged"]]
    return f"{sentence} Diverged: {', '.join(lost)}." if lost else sentence


def _at_equal_bytes(
    config: DeepConfig, results: Sequence[Result], base: str | None, claim: dict[str, Any] | None
) -> str:
    if base is None:
        label = Method.parse_like(config.like).label
        return f"Not run yet: {label}, the method that all others are compared with."
    if claim is not None and claim["gain"] is not None and len(claim["gain"]["seeds"]) > 1:
        both = " and ".join(f"{claim['bytes_per_step'][claim[key]]:,.0f}" for key in ("method", "against"))
        return (
            f"Within the same bytes ({both} per worker and step), {claim['method']}, the best practical "
            f"method on seeds 0 and 1, against {claim['against']} on fresh seeds: {_points(claim['gain'])}."
        )
    sizes = {r["method"]: r["payload_bytes_per_step"] for r in results}
    within = [r for r in _compared(results) if sizes[r["method"]] <= MOST_BYTES * sizes[base]]
    sentence = f"Within the bytes of {base}: {_all_points(within) or 'nothing run'}."
    if claim is None:
        return sentence
    return (
        f"{sentence} Best on seeds 0 and 1: {claim['method']}; run it and {claim['against']} on other seeds "
        "to measure its gain."
    )


def _by_rounds(config: DeepConfig, results: Sequence[Result], base: str | None) -> str:
    """RegTop-k's variants against Top-k with the same learning rate."""
    topk = next((r for r in results if r["method"] == base), None)
    ours = [r for r in results if Method.read(r["method"]).algorithm == "regtopk"]
    if topk is None or not ours:
        missing = [name for name, has in (("Top-k", topk is not None), ("RegTop-k", bool(ours))) if not has]
        return f"Not run yet: {' and '.join(missing)}."
    compared = [r for r in _compared(ours) if r["lr"] == topk["lr"]]
    if not compared:
        return f"RegTop-k and Top-k ({topk['mean']:.1f} %) have no seed and lr in common."
    points, gap = _all_points(compared), published_gap()
    if not config.is_as_published:
        is_related = config.preset in ("paper", "authors-script")
        published = f" Published, in its own setting: {gap:+.1f}." if is_related else ""
        return f"RegTop-k against Top-k ({topk['mean']:.1f} %): {points}.{published}"
    judged = [r for r in compared if len(r["difference_from_topk"]["seeds"]) >= LEAST_SEEDS]
    if not judged:
        return f"Published: {gap:.1f} points over Top-k. Here, on too few seeds for a verdict: {points}."
    highest = max(r["difference_from_topk"]["high"] for r in judged)
    verdict = "does not show here" if highest < gap else "is not excluded here"
    return f"The published advantage of {gap:.1f} points over Top-k {verdict}: {points}."


def published_gap() -> float:
    """RegTop-k's accuracy less Top-k's in the paper's Figure 3, the mean of its last five points."""
    figure = published_figure(3)
    pairs = zip(figure["regtopk"][-NUM_PUBLISHED:], figure["topk"][-NUM_PUBLISHED:], strict=True)
    return fmean(own - base for own, base in pairs)


def _compared(results: Sequence[Result]) -> list[Result]:
    return [r for r in results if r["difference_from_topk"]]


def _all_points(results: Sequence[Result]) -> str:
    return "; ".join(f"{r['method']} {_points(r['difference_from_topk'])}" for r in results)


def _points(found: dict[str, Any]) -> str:
    seeds = counted(len(found["seeds"]), "seed")
    if len(found["seeds"]) < LEAST_SEEDS:
        return f"{_signed(found['mean'])} points ({seeds})"
    interval = f"95 % {_signed(found['low'])} … {_signed(found['high'])}"
    return f"{_signed(found['mean'])} points ({interval}, {seeds})"


def _signed(number: float) -> str:
    """With a sign and one digit; what rounds to zero is never negative."""
    return f"{round(number, 1) + 0.0:+.1f}"
