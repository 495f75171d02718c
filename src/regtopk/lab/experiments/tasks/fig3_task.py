"""A deep training as a task: the data, the first models, and what workers send after their local steps."""

from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from regtopk.core.algorithm import WithDensity
from regtopk.core.worker import Layout, Worker
from regtopk.errors import ArgumentError
from regtopk.lab.experiments.compare.budget import NUM_STEPS
from regtopk.lab.experiments.compare.protocol import Run
from regtopk.lab.experiments.data.examples import Examples, load_examples
from regtopk.lab.experiments.data.splits import batch_order, divide, weights_of
from regtopk.lab.experiments.networks import NETWORKS, PIXELS
from regtopk.lab.experiments.networks.efficientnet import published_weights
from regtopk.lab.experiments.networks.engine import Engine
from regtopk.lab.experiments.networks.flat import flatten
from regtopk.lab.experiments.networks.weights import load_weights
from regtopk.lab.experiments.paper.fig3_config import PUBLISHED, DeepConfig
from regtopk.lab.experiments.tasks.task import Problem, Task


class DeepTask(Task):
    """Rounds of local steps of N workers, for R seeds.

    Args:
        config: of the training.
        engine: gives gradients and judges models; shared with other tasks of as many seeds.
        start: the first models (R, J).
        seeds: R of them: of the shards and of the batches.
    """

    is_loss_averaged: ClassVar[bool] = True

    def __init__(self, config: DeepConfig, engine: Engine, start: Tensor, seeds: Sequence[int]) -> None:
        self.config = config
        self.engine = engine
        self.seeds = list(seeds)
        self.num_workers = config.num_workers
        self.layout = engine.layout
        self._start = start
        shards = [divide(engine.examples.labels, config.num_workers, config.split, seed) for seed in seeds]
        num_steps = config.num_rounds * config.local_steps
        self.order = torch.stack(
            [batch_order(own, config.batch_size, num_steps, s) for own, s in zip(shards, seeds, strict=True)],
            1,
        ).to(start.device)  # (T H, R, N, B)
        self.weights = [None if config.uniform_weights else weights_of(own, config.split) for own in shards]

    def start(self) -> Tensor:
        """The same for all methods of a seed."""
        return self._start.clone()

    def grads(self, models: Tensor, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """What the workers send after round `step`, and their mean loss at its last local step."""
        messages, losses = self._local_steps(models, step, lr)
        return messages, losses.double().mean(-1)

    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """Accuracy in percent and mean loss, on the test examples."""
        return self.engine.evaluate(models)

    def outer_lr(self, lr: float) -> float:
        """The learning rate that the aggregate is applied with; differences of parameters need none."""
        return 1.0 if self.config.sends == "difference" else lr

    def _local_steps(self, models: Tensor, step: int, lr: float) -> tuple[Tensor, Tensor]:
        """What the workers send, (R, N, J), and their losses at the last local step, (R, N)."""
        num, first = self.config.local_steps, step * self.config.local_steps
        if num == 1 and self.config.sends != "difference":
            return self.engine.grads(models, self.order[first])
        start = models.unsqueeze(1)
        local = start.repeat(1, self.num_workers, 1)
        total = torch.zeros_like(local) if self.config.sends == "mean-gradient" else None
        for row in range(first, first + num):
            grads, losses = self.engine.grads(local, self.order[row])
            local.sub_(grads, alpha=lr)
            if total is not None:
                total.add_(grads, alpha=1 / num)
        if total is not None:
            return total, losses
        return (start - local if self.config.sends == "difference" else grads), losses


class DeepProblem(Problem):
    """The examples on their device, and one engine for each number of seeds at once.

    Args:
        config: of the training.
        examples: what is learned; None: read them as the configuration says.

    Raises:
        ArgumentError: something does not fit: the network, the split, or a method's k.
    """

    def __init__(self, config: DeepConfig, examples: Examples | None = None) -> None:
        super().__init__()
        self.config = config
        pixels = PIXELS.get(config.network)
        self.examples = examples or load_examples(config.data_set, config.data, config.device, pixels)
        self._engines: dict[int, Engine] = {}
        network = make_network(config, self.examples.num_classes, config.plan.seeds[0])
        self.numel = sum(p.numel() for p in network.parameters())
        check_takes(config, self.examples, network)
        check_fits(config, self.examples.labels, self.numel)

    @property
    def contents(self) -> dict[str, str]:
        """What tells its examples and first weights from others of the same name."""
        found, path = {"examples": self.examples.fingerprint}, weights_file(self.config)
        if path is not None:
            found["weights_sha256"] = sha256(path.read_bytes()).hexdigest()[:16]
        return found

    def make_task(self, seeds: Sequence[int]) -> Task:
        """On an engine that is shared with other seeds, if there are as many."""
        start = torch.stack([self.first_model(seed) for seed in seeds])
        return DeepTask(self.config, self.engine(len(seeds)), start, seeds)

    def probe(self) -> Task:
        """Of seed 0: plain gradients, without a graph, which would be captured for a few calls."""
        one_step = {"num_rounds": NUM_STEPS, "local_steps": 1, "sends": "mean-gradient"}
        config = replace(self.config, **one_step, num_branches=0, compiled=False)  # type: ignore[arg-type]
        return DeepProblem(config, self.examples).task([0])

    def engine(self, num_models: int) -> Engine:
        """The engine that all methods share, by the number of seeds at once."""
        config = self.config
        if num_models not in self._engines:
            self._engines[num_models] = Engine(
                make_network(config, self.examples.num_classes, seed=0),
                self.examples,
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
        return self._engines[num_models]

    def first_model(self, seed: int) -> Tensor:
        """The parameters every method of a seed starts from, (J,)."""
        network = make_network(self.config, self.examples.num_classes, seed)
        return flatten(network).to(self.examples.train.device)


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


def check_takes(config: DeepConfig, examples: Examples, network: nn.Module) -> None:
    """Refuse a network that does not take these examples."""
    try:
        with torch.no_grad():
            network.to(config.device)(examples.read(examples.train[:2], config.image_size, torch.float32))
    except (RuntimeError, ArgumentError) as error:
        raise ArgumentError(
            f"network must take examples of data_set {config.data_set!r}, got {config.network!r}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def check_fits(config: DeepConfig, labels: Tensor, numel: int) -> None:
    """Refuse a split that these examples do not have, and a k that is larger than the network."""
    divide(labels, config.num_workers, config.split, config.plan.seeds[0])
    anyone = torch.ones(()), torch.zeros((), dtype=torch.int64), config.num_workers, 0
    worker = Worker(*anyone, Layout.anonymous(numel))
    for method in config.plan.methods:
        algorithm = config.build(Run(method, config.density))
        if isinstance(algorithm, WithDensity):
            algorithm.num_selected(worker)
