"""Deep networks as tasks: a GPT on the tokens of a text, ResNet-18 and a small network on images."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from regtopk.errors import ArgumentError
from regtopk.lab.experiments.data.examples import Examples, of_images, of_text
from regtopk.lab.experiments.data.text import load_text
from regtopk.lab.experiments.networks.convolutional import NETWORKS
from regtopk.lab.experiments.networks.engine import Engine
from regtopk.lab.experiments.networks.gpt import GPT
from regtopk.lab.experiments.tasks.task import DTYPES, NetworkTask, TaskSettings

HEAD = 64  # width of an attention head; a narrower network has one head
MOST_TESTED = 4096  # windows of the test part that are evaluated
NUM_BRANCHES = 8  # workers of a seed that run side by side in a CUDA graph


class DeepTask(NetworkTask):
    """A deep network, whose workers' passes an engine runs side by side on a GPU."""

    is_loss_averaged = True
    network_settings: ClassVar[tuple[str, ...]] = ("precision",)
    is_compiled: ClassVar[bool] = False  # whether torch.compile fuses small operations on a GPU
    is_stacked: ClassVar[bool] = False  # whether the network computes for all workers at once on a GPU

    def __init__(self, config: TaskSettings, seeds: Sequence[int], examples: Examples) -> None:
        super().__init__(config, seeds, examples)
        self._engines: dict[bool, Engine] = {}  # by whether workers have weights of their own

    def grads_at(self, models: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """In buffers that the next call overwrites."""
        return self._engine(models.dim() == 3).grads(models, rows)

    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """The test loss, and what is guessed right of the test examples, in percent."""
        engine = next(iter(self._engines.values()), None) or self._engine(has_own_weights=False)
        return engine.evaluate(models)

    def _engine(self, has_own_weights: bool) -> Engine:
        is_on_gpu = self.config.device == "cuda"
        is_stacked = self.is_stacked and is_on_gpu
        has_own_weights |= is_stacked  # one pass for all workers has their weights, be they equal or not
        if has_own_weights not in self._engines:
            self._engines[has_own_weights] = Engine(
                self.network,
                self.examples,
                num_models=len(self.seeds),
                num_workers=self.num_workers,
                batch_size=self.config.batch_size,
                dtype=DTYPES[self.config.precision],
                has_own_weights=has_own_weights,
                num_branches=NUM_BRANCHES * len(self.seeds),
                is_compiled=self.is_compiled and is_on_gpu,
                is_stacked=is_stacked,
            )
        return self._engines[has_own_weights]


class Gpt(DeepTask):
    """The next token of a text: the test loss in nats per token, and in bits per byte of the text."""

    metric = "test_loss"
    metric_words = "test loss, nats per {token}"
    is_better_higher = False
    has_blocks = True
    is_compiled = True
    is_stacked = True
    base = "dense"
    contents = "text_sha256"
    network_settings = ("tokens", "num_layers", "width", "context", "precision")
    defaults: ClassVar = dict(
        num_workers=8, num_steps=1536, batch_size=16, lr=(0.004,), optimizer="adamw",
        num_layers=6, width=256, context=128,
    )  # fmt: skip

    @classmethod
    def check(cls, config: TaskSettings) -> None:
        """Refuse sizes that make no network, and a split by classes."""
        super().check(config)
        if config.width > HEAD and config.width % HEAD:
            raise ArgumentError(f"width must be a multiple of {HEAD}, or smaller, got {config.width}")
        if config.split.startswith("dirichlet"):
            raise ArgumentError(f"split must be iid or sorted for gpt, without classes, got {config.split!r}")

    @classmethod
    def load(cls, config: TaskSettings) -> Examples:
        """Windows of the text."""
        window = config.context + 1
        text = load_text(Path(config.data) if config.data else None, tokens=config.tokens, window=window)
        return of_text(text, config.device, window, MOST_TESTED)

    def evaluate(self, models: Tensor) -> list[dict[str, float]]:
        """The test loss, also in bits per byte where bytes are counted, and what is guessed right."""
        qualities = super().evaluate(models)
        if (token_bytes := self.examples.token_bytes) is not None:
            bytes_per_target = float(token_bytes[self.examples.test_targets].double().mean())
            for quality in qualities:
                quality["bits_per_byte"] = quality["test_loss"] / bytes_per_target / math.log(2)
        return qualities

    @classmethod
    def draw_network(cls, config: TaskSettings, examples: Examples) -> GPT:
        """With GPT-2's initialisation."""
        num_heads = max(1, config.width // HEAD)
        return GPT(examples.num_classes, config.context, config.width, config.num_layers, num_heads)


class ImageNetwork(DeepTask):
    """A deep network on images: the test accuracy in percent."""

    metric = "accuracy"
    is_better_higher = True
    num_last = 5
    num_at_once = 3
    architecture: ClassVar[str]  # one of NETWORKS
    data_set: ClassVar[str] = "cifar10"
    defaults: ClassVar = dict(num_workers=8, num_steps=2520, batch_size=20, lr=(0.01,))

    @classmethod
    def load(cls, config: TaskSettings) -> Examples:
        """The images, standardised."""
        return of_images(cls.data_set, config.data, config.device)

    @classmethod
    def draw_network(cls, config: TaskSettings, examples: Examples) -> nn.Module:
        """With torchvision's initialisation."""
        return NETWORKS[cls.architecture](examples.num_classes)


class ResNet18Task(ImageNetwork):
    """CIFAR-10 with ResNet-18."""

    architecture = "resnet18"


class ResNet18GroupNormTask(ImageNetwork):
    """CIFAR-10 with ResNet-18 and group norm, which torch.compile makes twice as fast."""

    architecture = "resnet18-gn"
    is_compiled = True


class SmallCnnTask(ImageNetwork):
    """Digits with a small convolutional network, for a quick look on a CPU."""

    architecture = "small-cnn"
    data_set = "digits"
