"""Figure 3 and its relatives: deep networks trained by simulated workers."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from regtopk.lab.experiments.compare.comparison import Comparison
from regtopk.lab.experiments.compare.results import (
    PICKING_SEEDS,
    Finals,
    Key,
    base_of,
    best_of,
    difference,
    diverged_of,
    finals_of,
    mean_there,
    summarise,
)
from regtopk.lab.experiments.experiment import Summary
from regtopk.lab.experiments.networks import NETWORKS
from regtopk.lab.experiments.networks.norm import BatchNorm
from regtopk.lab.experiments.paper.fig3_config import PRESETS, DeepConfig
from regtopk.lab.experiments.paper.finding import MOST_BYTES, finding
from regtopk.lab.experiments.published import published_figure
from regtopk.lab.experiments.tasks.fig3_task import DeepProblem
from regtopk.lab.method import Method
from regtopk.lab.runs import Panel, Record

PUBLISHED = {"topk": "topk", "regtopk:mu=5": "regtopk"}  # of our methods, in the paper's figure
NOT_PRACTICAL = ("global-topk", "dense")  # asks for what no cluster can know; sends everything


def summarise_deep(config: DeepConfig, records: Sequence[Record]) -> Summary:
    """The comparison, the best method on fresh seeds at equal bytes, and a sentence on what came out."""
    summary = summarise(config, records)
    finals, results = finals_of(config, records), summary["results"]
    lost = diverged_of(config, records)
    base = base_of(config, finals, lost, ("", None))
    num_bytes = {r["method"]: r["payload_bytes_per_step"] for r in results}
    claim = _claim(config, finals, lost, base, num_bytes) if config.like and base else None
    label = base and base[0]
    return {
        "preset": config.preset,
        "base": label,
        "claim": claim,
        "finding": finding(config, results, label, claim),
        **summary,
    }


def _claim(
    config: DeepConfig, finals: Finals, lost: set[Key], base: Key, num_bytes: dict[str, float]
) -> dict[str, Any] | None:
    """The best practical method on the picking seeds within the bytes, and its gain on fresh seeds.

    Both sides have the learning rate, of those that were run, that is best for them on the picking seeds.
    """
    candidates = [
        key
        for key, own in finals.items()
        if key not in lost
        and not config.is_like(Method.read(key[0]))
        and num_bytes[key[0]] <= MOST_BYTES * num_bytes[base[0]]
        and all(seed in own for seed in PICKING_SEEDS)
        and Method.read(key[0]).algorithm not in NOT_PRACTICAL
    ]
    best = best_of(finals, candidates)
    if best is None:
        return None
    fresh = {seed: value for seed, value in finals[best].items() if seed not in PICKING_SEEDS}
    return {
        "method": best[0],
        "picked_on": list(PICKING_SEEDS),
        "accuracy_there": mean_there(finals[best]),
        "against": base[0],
        "bytes_per_step": {label: num_bytes[label] for label in (best[0], base[0])},
        "gain": difference(fresh, finals[base]),
    }


def published_accuracy(config: DeepConfig, method: Method, step: int) -> Record:
    """The paper's accuracy at a round, for the protocol and the methods it was published for."""
    if not config.is_as_published or method.label not in PUBLISHED:
        return {}
    figure = published_figure(3)
    curve = dict(zip(figure["iteration"], figure[PUBLISHED[method.label]], strict=True))
    return {"published": curve[step]} if step in curve else {}


def panels(config: DeepConfig) -> Sequence[Panel]:
    """Accuracy and loss by round (beside the published curves), and accuracy by bytes."""
    y_label = "test accuracy, %"
    title, dots = "Accuracy, by rounds", None
    if config.is_as_published:
        title, dots = f"{title}; published as circles", "published"
    bytes_label = "bytes a worker has contributed"
    return (
        Panel(title, "step", "accuracy", "round", y_label, dots=dots),
        Panel("Training loss", "step", "loss", "round", "training loss"),
        Panel("Accuracy, by bytes", "payload_bytes", "accuracy", bytes_label, y_label, log_x=True),
    )


def title_of(config: DeepConfig) -> str:
    """The preset, and what of it was changed."""
    free = {"device", "deterministic", "compiled", "precision", "evaluate_every", "like"}
    free |= {"value_code"} if config.like else set()  # which methods then say themselves
    preset = DeepConfig(preset=config.preset, **PRESETS[config.preset]).shared
    changed = {key: value for key, value in config.shared.items() if key not in free and value != preset[key]}
    words = [key if value is True else f"{key}={value}" for key, value in changed.items()]
    budget = [f"at the bytes of {config.like}"] if config.like else []
    return f"Deep networks: {', '.join([config.preset, *words, *budget])}"


def description_of(config: DeepConfig) -> str:
    """The settings in a few sentences, and how accuracy was measured."""
    statistics = (
        "each test batch's own statistics"
        if config.batch_statistics
        else "the statistics of (up to) 2,000 training images under the evaluated weights"
    )
    with torch.device("meta"):
        has_batch_norm = any(isinstance(part, BatchNorm) for part in NETWORKS[config.network](10).modules())
    norm = f" Batch norm is evaluated with {statistics}." if has_batch_norm else ""
    coded = f" Values travel as {config.value_code} unless a method says otherwise." if config.like else ""
    num_last = min(config.plan.num_last, math.ceil(config.num_rounds / config.evaluate_every))
    accuracy = "the last evaluation" if num_last == 1 else f"the mean of the last {num_last} evaluations"
    steps = (
        "" if config.local_steps == 1 else f", {config.local_steps} local steps per round ({config.sends})"
    )
    return (
        f"{config.network} on {config.data_set}, {config.num_workers} workers, batches of "
        f"{config.batch_size}{steps}, split {config.split}, {config.optimizer} with lr {config.lr:g}, "
        f"{config.precision}. All methods of a seed start from the same model and see the same batches. "
        f"Accuracy is {accuracy} on the test set.{norm}{coded}"
    )


FIG3 = Comparison(
    name="fig3",
    title=title_of,
    about=description_of,
    config=DeepConfig,
    presets=PRESETS,
    load=DeepProblem,
    extras=published_accuracy,
    summarise=summarise_deep,
    panels=panels,
)
