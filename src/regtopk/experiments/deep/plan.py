"""What a slice of a deep experiment runs: which densities, and from which first models."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from regtopk.experiments.budget import NUM_STEPS, Probe
from regtopk.experiments.compare_config import parse_like
from regtopk.experiments.deep.config import PUBLISHED, DeepConfig
from regtopk.experiments.deep.engine import Engine
from regtopk.experiments.deep.examples import Examples
from regtopk.experiments.deep.flat import flatten
from regtopk.experiments.deep.method import Method
from regtopk.experiments.deep.networks import NETWORKS
from regtopk.experiments.deep.networks.efficientnet import published_weights
from regtopk.experiments.deep.networks.weights import load_weights
from regtopk.experiments.methods import make_method
from regtopk.experiments.splits import batch_order, divide, weights_of


def make_network(config: DeepConfig, num_classes: int, seed: int) -> nn.Module:
    """The network as it starts: its own initialisation by seed, or given weights with a new head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = NETWORKS[config.network](num_classes)
    path = weights_file(config)
    if path is not None:
        load_weights(network, path, replace_head=True)
    return network


def weights_file(config: DeepConfig) -> Path | None:
    """Where the weights to start from are; None: from scratch."""
    if config.weights == PUBLISHED:
        return published_weights()
    return Path(config.weights) if config.weights else None


def make_engine(config: DeepConfig, examples: Examples, num_models: int) -> Engine:
    """What all methods share, for so many seeds at once."""
    return Engine(
        make_network(config, examples.num_classes, seed=0),
        examples,
        num_models=num_models,
        num_workers=config.num_workers,
        batch_size=config.batch_size,
        dtype=torch.bfloat16 if config.precision == "bfloat16" else torch.float32,
        has_own_weights=config.local_steps > 1 or config.sends == "difference",
        double_softmax=config.double_softmax,
        image_size=config.image_size,
        batch_statistics=config.batch_statistics,
        num_branches=config.num_branches * num_models,
        is_compiled=config.compiled and config.device == "cuda",
    )


def first_params(config: DeepConfig, examples: Examples, seed: int) -> Tensor:
    """The parameters every method of a seed starts from, (J,)."""
    return flatten(make_network(config, examples.num_classes, seed)).to(examples.train.device)


class Densities:
    """The density of each method whose words leave it open.

    At equal bytes it is the largest whose mean payload, on the first gradients of seed 0, is within those of
    the method that `like` names.
    """

    def __init__(self, config: DeepConfig, examples: Examples) -> None:
        self.config = config
        self.examples = examples
        self._probe: Probe | None = None
        self._budget = 0.0

    def of(self, method: Method) -> float | None:
        """None where the words say it, or where there is none."""
        if not method.takes_density:
            return None
        if not self.config.like:
            return self.config.density
        if self._probe is None:
            self._probe = self._make_probe()
            name, density, index_code, value_code = parse_like(self.config.like)
            like = make_method(name, density=density, value_code=value_code)
            self._budget = self._probe.payload(like, index_code)
        return self._probe.find_density(
            lambda density: method.algorithm(density, self.config.value_code),
            method.index_code,
            self._budget,
            name=method.label,
        )

    def _make_probe(self) -> Probe:
        config, examples = self.config, self.examples
        shards = divide(examples.labels, config.num_workers, config.split, 0)
        order = batch_order(shards, config.batch_size, NUM_STEPS, 0).to(examples.train.device)
        engine = make_engine(replace(config, local_steps=1, num_branches=0, compiled=False), examples, 1)
        params = first_params(config, examples, 0)
        grads = [engine.grads(params, rows)[0][0].clone() for rows in order]
        weights = None if config.uniform_weights else weights_of(shards, config.split)
        return Probe(grads, weights, engine.layout)
