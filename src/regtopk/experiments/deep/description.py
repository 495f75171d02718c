"""What a deep training is called, and described by, on its page."""

import math

import torch

from regtopk.experiments.deep.config import PRESETS, DeepConfig
from regtopk.experiments.deep.finding import LAST_EVALUATIONS
from regtopk.experiments.deep.networks import NETWORKS
from regtopk.experiments.deep.networks.norm import BatchNorm

TITLE = "Deep networks"


def title_of(config: DeepConfig) -> str:
    """The preset, and what of it was changed."""
    free = {"device", "deterministic", "compiled", "precision", "evaluate_every", "like"}
    free |= {"value_code"} if config.like else set()  # which methods then say themselves
    preset = DeepConfig(preset=config.preset, **PRESETS[config.preset]).protocol
    changed = {
        key: value for key, value in config.protocol.items() if key not in free and value != preset[key]
    }
    words = [key if value is True else f"{key}={value}" for key, value in changed.items()]
    budget = [f"at the bytes of {config.like}"] if config.like else []
    return f"{TITLE}: {', '.join([config.preset, *words, *budget])}"


def description_of(config: DeepConfig) -> str:
    """Its settings in a few sentences, and how accuracy was measured."""
    statistics = (
        "each test batch's own statistics"
        if config.batch_statistics
        else "the statistics of (up to) 2,000 training images under the evaluated weights"
    )
    with torch.device("meta"):
        has_batch_norm = any(isinstance(part, BatchNorm) for part in NETWORKS[config.network](10).modules())
    norm = f" Batch norm is evaluated with {statistics}." if has_batch_norm else ""
    coded = f" Values travel as {config.value_code} unless a method says otherwise." if config.like else ""
    num_last = min(LAST_EVALUATIONS, math.ceil(config.num_rounds / config.evaluate_every))
    accuracy = "the last evaluation" if num_last == 1 else f"the mean of the last {num_last} evaluations"
    steps = "" if config.local_steps == 1 else f", {config.local_steps} local steps a round ({config.sends})"
    return (
        f"{config.network} on {config.data_set}, {config.num_workers} workers, batches of "
        f"{config.batch_size}{steps}, split {config.split}, {config.optimizer} with lr {config.lr:g}, "
        f"{config.precision}. All methods of a seed start from the same model and see the same batches. "
        f"Accuracy is {accuracy} on the test set.{norm}{coded}"
    )
